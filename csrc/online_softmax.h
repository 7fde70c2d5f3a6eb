// Softmax statistics of part of a row, and how two parts merge: log-sum-exp and entropy in one pass over the logits.
//
// In base 2 with c = log2(e) / temperature, z = x c:
//   max       the largest logit
//   sum       sum of 2^(z - top), top = max c rounded to float32
//   weighted  sum of 2^(z - top) * (z - top)
//   lse = ln2 (top + log2 sum)      entropy = ln2 (log2 sum - weighted / sum)
//
// Whatever top is rounded to cancels, as long as 2^(z - top) stays in range. From |top| = 2^30 on, "far" from zero, it
// would not. But neighbouring logits are 64 and more apart in z there: to float32 only the ties of max have a
// probability, and any c that keeps the others far below them will do, one that rounds nothing.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "surrogate.h"

namespace dapo {

struct SoftmaxPart {
  float max, sum, weighted;
};

// Exponents of logits under a maximum: x scale - top.
struct Base2 {
  float scale, top;
};

// Of what follows row_kernels.cpp takes base2, compiled once per instruction set: static, each has its own copy.

static DAPO_HOST_DEVICE bool is_far(float top) { return !(fabsf(top) < 0x1p30f); }

// Rounded up where 2^(z - top) would otherwise reach 2, too large for the CPU's exponentials in 16 bits (simd.h).
// Infinite or NaN where float32 overflows, and then far.
static DAPO_HOST_DEVICE float top_of(float max, float c) {
  const float top = max * c;
  if (fabsf(top) <= 0x1p24f || fmaf(max, c, -top) <= 0.5f) return top;
  return fmaf(fabsf(top), 0x1.8p-24f, top);  // the next float32
}

static DAPO_HOST_DEVICE Base2 base2(float max, float c) {
  const float top = top_of(max, c);
  if (!is_far(top)) return {c, top};
  if (max == -INFINITY) return {c, 0.0f};
  uint32_t bits;
  std::memcpy(&bits, &max, 4);
  bits &= 0x7f800000u;  // the power of two in max
  float power;
  std::memcpy(&power, &bits, 4);
  const float scale = fminf(0x1p31f / power, 0x1p127f);
  return {scale, max * scale};
}

DAPO_HOST_DEVICE SoftmaxPart empty_part() { return {-INFINITY, 0.0f, 0.0f}; }

// From one part's top to another's.
DAPO_HOST_DEVICE float shift_of(float from, float to, float c) {
  const float a = top_of(from, c), b = top_of(to, c);
  return is_far(a) || is_far(b) ? (from - to) * c : a - b;
}

// a, lifted to a maximum >= a.max.
DAPO_HOST_DEVICE SoftmaxPart lift(SoftmaxPart a, float max, float c) {
  if (a.max == -INFINITY) return {max, a.sum, a.weighted};  // nothing yet, or NaN sums that must stay
  const float shift = shift_of(a.max, max, c), scale = exp2f(shift);
  return {max, a.sum * scale, scale == 0.0f ? 0.0f : scale * (a.weighted + shift * a.sum)};
}

DAPO_HOST_DEVICE SoftmaxPart merge(SoftmaxPart a, SoftmaxPart b, float c) {
  const float max = a.max > b.max ? a.max : b.max;
  a = lift(a, max, c);
  b = lift(b, max, c);
  return {max, a.sum + b.sum, a.weighted + b.weighted};
}

}  // namespace dapo
