// Softmax statistics of part of a row, and how two parts merge: log-sum-exp and entropy in one pass over the logits.
//
// In base 2 with c = log2(e) / temperature, z = x c:
//   top       a reference near max(z) (any value that keeps 2^(z - top) in range would do)
//   sum       sum of 2^(z - top)
//   weighted  sum of 2^(z - top) * (z - top)
//   lse = ln2 (top + log2 sum)      entropy = ln2 (log2 sum - weighted / sum)
#pragma once

#include <cmath>

#include "surrogate.h"

namespace dapo {

struct SoftmaxPart {
  float top, sum, weighted;
};

DAPO_HOST_DEVICE SoftmaxPart empty_part() { return {-INFINITY, 0.0f, 0.0f}; }

// a, lifted to the reference `top` >= a.top.
DAPO_HOST_DEVICE SoftmaxPart lift(SoftmaxPart a, float top) {
  if (a.top == -INFINITY) return {top, a.sum, a.weighted};  // nothing yet, or NaN sums that must stay
  const float shift = a.top - top;
  const float scale = exp2f(shift);
  return {top, a.sum * scale, scale == 0.0f ? 0.0f : scale * (a.weighted + shift * a.sum)};
}

DAPO_HOST_DEVICE SoftmaxPart merge(SoftmaxPart a, SoftmaxPart b) {
  const float top = a.top > b.top ? a.top : b.top;
  a = lift(a, top);
  b = lift(b, top);
  return {top, a.sum + b.sum, a.weighted + b.weighted};
}

}  // namespace dapo
