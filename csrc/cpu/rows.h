// Operations over all rows of a logits tensor, and the elementwise one over all tokens. Threads: OpenMP.
#pragma once

#include "../params.h"

namespace dapo {

enum class InputFault : int32_t { none = 0, target_out_of_range = 1, bad_temperature = 2 };

struct Fault {
  InputFault kind;
  int64_t row;
};

// The first live row whose target or temperature is unusable. Everything below assumes there is none.
Fault find_fault(const Rows& logits, const TokenInputs& tokens);

// logprobs, norm and, unless null, entropy.
void row_stats(const Rows& logits, const TokenInputs& tokens, const TokenOutputs& out, int threads);

// `row_stats` and, from them, the loss: its derivative by each log-prob is in d_logprobs, the logits stay as they are.
double row_slopes(const Rows& logits, const TokenInputs& tokens, const Objective& objective, float entropy_coef,
                  const TokenOutputs& out, int threads);

// d loss / d logits into `grad` (may be `logits`), from d loss / d logprob and d loss / d entropy (or null). `zeroed`:
// `grad` holds zeros, and rows without a gradient are left as they are.
void row_grad(const Rows& logits, const Rows& grad, const TokenInputs& tokens, const float* norm, const float* entropy,
              const float* d_logprobs, const float* d_entropy, bool zeroed, int threads);

// Loss and per-token results; the gradient overwrites the logits. One pass over memory.
double row_loss(const Rows& logits, const TokenInputs& tokens, const Objective& objective, float entropy_coef,
                const TokenOutputs& out, int threads);

// The objective from log-probs that are already there: loss, d_logprobs, d_log_ratio, clip_hit, ref_kl.
double token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                  const TokenOutputs& out);

}  // namespace dapo
