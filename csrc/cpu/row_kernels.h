// The O(V) kernels over one block of a row, as a table of functions per instruction set.
#pragma once

#include <cstdint>

#include "../online_softmax.h"
#include "../params.h"

namespace dapo {

// A row is cut into blocks of this many logits. The statistics of a row are those of its blocks merged in order, so
// its bits depend neither on the number of threads nor on where the row stands. 2048 floats stay in the L1 cache
// between the pass for the maximum and the pass for the exponentials.
constexpr int64_t kBlock = 2048;

// Kernels of one dtype. `c` = log2(e) / temperature turns logits into base-2 exponents.
struct BlockKernels {
  // Statistics of x[0, n). With `keep` (not float16) x is overwritten by its exponentials.
  SoftmaxPart (*stats)(void* x, int64_t n, float c, bool weighted, bool keep, const void* ahead);
  // x *= scale, for the exponentials that `stats` kept.
  void (*scale)(void* x, int64_t n, float scale);
  // out = p (a + b y) with p = 2^y, y = x scale - top: the gradient row but for the target's own entry. `past_caches`:
  // float32 in aligned blocks is stored as by stream_zeros.
  void (*grad)(const void* x, void* out, int64_t n, Base2 base2, float a, float b, const void* ahead, bool past_caches);
  float (*get)(const void* x, int64_t i);
  void (*set)(void* x, int64_t i, float value);
};
// `ahead`: what the caller will read later, as many bytes as the block has; fetched into the L2 cache meanwhile.

struct RowKernels {
  const char* isa;
  BlockKernels by_dtype[3];  // indexed by Dtype
  // Zeros that go to memory past the caches: an ordinary store would first read what it overwrites. Other threads see
  // them after stream_fence.
  void (*stream_zeros)(void* x, int64_t bytes);
  void (*stream_fence)();
  // A float32 running sum held as two planes: `high` is its upper half, a bfloat16, `low` the other 16 bits.
  void (*add_split)(uint16_t* high, uint16_t* low, const uint16_t* bf16_part, int64_t n);
  // Rounds the sum to nearest even into `high`.
  void (*round_split)(uint16_t* high, const uint16_t* low, int64_t n);
};

const RowKernels& row_kernels_portable();
#if defined(DAPO_X86)
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();
const RowKernels& row_kernels_avx512bf16();
#endif

// The best set this processor runs, or the one DAPO_KERNELS_ISA names. Throws when that cannot run here.
const RowKernels& row_kernels();

}  // namespace dapo
