// Two floats whose sum is the number: what row_math.h takes on a GPU in place of double. One thread works out a row's
// scalars while its block waits, and a GPU's arithmetic in double takes a subroutine for every logarithm and division,
// on units that are few (two per SM against 128 for float, other than on data center GPUs).
//
// Relative errors in units of 2^-24, half the distance between two floats: sums that do not cancel, products and
// quotients 2^-20; log_of 0.06; exp_of and expm1_of those of the float functions, at most 3.
#pragma once

#include <cmath>

#include "../row_math.h"

namespace dapo {

struct DoubleFloat {
  float hi, lo;

  DoubleFloat() = default;
  DAPO_HOST_DEVICE DoubleFloat(float hi, float lo) : hi(hi), lo(lo) {}
  DAPO_HOST_DEVICE DoubleFloat(float x) : hi(x), lo(0.0f) {}
  DAPO_HOST_DEVICE explicit DoubleFloat(double constant)
      : hi(static_cast<float>(constant)), lo(static_cast<float>(constant - hi)) {}
  DAPO_HOST_DEVICE explicit operator float() const { return hi; }
};

// s + e, |e| much smaller than |s|; what is infinite or NaN has no second part.
DAPO_HOST_DEVICE DoubleFloat joined(float s, float e) {
  if (!(fabsf(s) < INFINITY)) return s;
  const float hi = s + e;
  return {hi, e - (hi - s)};
}

DAPO_HOST_DEVICE DoubleFloat operator+(DoubleFloat a, DoubleFloat b) {
  const float s = a.hi + b.hi, from_b = s - a.hi;
  return joined(s, ((a.hi - (s - from_b)) + (b.hi - from_b)) + (a.lo + b.lo));
}
DAPO_HOST_DEVICE DoubleFloat operator-(DoubleFloat a) { return {-a.hi, -a.lo}; }
DAPO_HOST_DEVICE DoubleFloat operator-(DoubleFloat a, DoubleFloat b) { return a + -b; }
DAPO_HOST_DEVICE DoubleFloat operator*(DoubleFloat a, DoubleFloat b) {
  const float p = a.hi * b.hi;
  return joined(p, fmaf(a.hi, b.hi, -p) + fmaf(a.hi, b.lo, a.lo * b.hi));
}
DAPO_HOST_DEVICE DoubleFloat operator/(DoubleFloat a, DoubleFloat b) {
  const float inverse = 1.0f / b.hi, q = a.hi * inverse;
  return joined(q, (fmaf(-q, b.hi, a.hi) + fmaf(-q, b.lo, a.lo)) * inverse);
}
DAPO_HOST_DEVICE bool operator<(DoubleFloat a, float b) { return a.hi < b; }

// x = 2^k m with m in [0.7, 1.4], s = (m - 1) / (m + 1): log m = 2 (s + s^3/3 + s^5/5 ...). All but 2 s is at most a
// hundredth of it, and floats serve.
template <> DAPO_HOST_DEVICE DoubleFloat log_of<DoubleFloat>(float x) {
  if (!(x >= 0x1p-126f && x < INFINITY)) return logf(x);
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const int k = static_cast<int>(bits - 0x3f3504f3u) >> 23;  // m from sqrt(1/2)
  bits -= static_cast<uint32_t>(k) << 23;
  float m;
  std::memcpy(&m, &bits, 4);
  const DoubleFloat s = DoubleFloat(m - 1.0f) / (DoubleFloat(m) + 1.0f);
  const float t = s.hi * s.hi;
  float tail = fmaf(t, 2.0f / 13.0f, 2.0f / 11.0f);
  tail = fmaf(tail, t, 2.0f / 9.0f);
  tail = fmaf(tail, t, 2.0f / 7.0f);
  tail = fmaf(tail, t, 2.0f / 5.0f);
  tail = fmaf(tail, t, 2.0f / 3.0f);
  const DoubleFloat log_m = joined(2.0f * s.hi, fmaf(tail, t * s.hi, 2.0f * s.lo));
  return DoubleFloat(kLn2) * static_cast<float>(k) + log_m;
}

template <> DAPO_HOST_DEVICE DoubleFloat exp_of(DoubleFloat x) {
  const float e = expf(x.hi);
  return fmaf(e, x.lo, e);
}

template <> DAPO_HOST_DEVICE DoubleFloat expm1_of(DoubleFloat x) {
  const float e = expm1f(x.hi);
  return fmaf(1.0f + e, x.lo, e);
}

}  // namespace dapo
