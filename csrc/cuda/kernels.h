// The CUDA operations over rows of logits and over tokens: what the bindings call. Nothing here allocates; `stream` is a
// cudaStream_t as an integer; every launch is checked (check.h).
#pragma once

#include <cstdint>
#include <string>

#include "../params.h"
#include "../row_math.h"

namespace dapo::cuda {

// How the loss of a row is computed. The results are the same bits whichever it is.
enum class Path : int32_t {
  automatic = 0,
  cluster = 1,  // compute capability 9.0 and later: a row in the shared memory of a cluster, read once, written once
  sweep = 2,    // one block reads a row twice, the second time mostly from the L2 cache
  split = 3,    // one block per slice of a row: few, wide rows
};

// c of c·tanh(x/c), and 1/c; zeros for none.
struct Softcap {
  float value, inverse;
};

struct Operands {
  Rows logits;
  TokenInputs tokens;
  Softcap softcap;
};

// The statistics of an earlier pass, and d loss / d logprob and d loss / d entropy (or null).
struct GradInputs {
  const float *norm, *entropy, *d_logprobs, *d_entropy;
};

// Why the runtime, which is linked in, finds no device: the driver may be too old for it. "" if it finds one.
std::string device_error();

// Scratch memory that row_stats, row_grad and row_loss want, aligned to 16 bytes.
int64_t workspace_bytes(const Rows& logits);

// logprobs, norm and, unless null, entropy.
void row_stats(const Operands& in, const TokenOutputs& out, void* workspace, uintptr_t stream);

// d loss / d logits into `grad`, which may be the logits.
void row_grad(const Operands& in, const Rows& grad, const GradInputs& from, void* workspace, uintptr_t stream);

// Per-token results and each row's loss; the gradient overwrites the logits. At most `rows_in_flight` rows are read twice
// at a time.
void row_loss(const Operands& in, const Objective& objective, float entropy_coef, const TokenOutputs& out,
              double* losses, void* workspace, Path path, int64_t rows_in_flight, uintptr_t stream);

// The objective from log-probs that are already there: losses, d_logprobs, d_log_ratio, clip_hit, ref_kl.
void token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                const TokenOutputs& out, double* losses, uintptr_t stream);

// Which path `automatic` takes for these rows on the current device.
Path choose_path(const Rows& logits);

}  // namespace dapo::cuda
