// Elements and vectors of 16 bytes: float32, bfloat16, float16 to float and back. For the device, and for the host so
// that the kernels' phases run there in tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "../cpu/simd.h"
#endif

#include "kernels.h"
#include "tiles.h"

namespace dapo::cuda {

#if defined(__CUDA_ARCH__)
#define DAPO_UNROLL _Pragma("unroll")
#else
#define DAPO_UNROLL
#endif

struct alignas(16) Word {
  uint32_t x[4];
};

#if defined(__CUDACC__)

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T> DAPO_HOST_DEVICE float widen(T x) { return static_cast<float>(x); }
template <class T> DAPO_HOST_DEVICE void narrow(float x, T* out) { *out = static_cast<T>(x); }  // to the nearest

#else

using bf16 = DAPO_ISA::bf16;
using f16 = DAPO_ISA::f16;
using DAPO_ISA::narrow;
using DAPO_ISA::widen;

#endif

template <class To, class From> DAPO_HOST_DEVICE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
  To to;
  std::memcpy(static_cast<void*>(&to), &from, sizeof(to));
  return to;
}

// Global memory that nothing reads again: the line leaves the caches first.
DAPO_HOST_DEVICE Word load_last(const Word* from) {
#if defined(__CUDA_ARCH__)
  return bits_as<Word>(__ldcs(reinterpret_cast<const uint4*>(from)));
#else
  return *from;
#endif
}
DAPO_HOST_DEVICE void store_last(Word* to, const Word& word) {
#if defined(__CUDA_ARCH__)
  __stcs(reinterpret_cast<uint4*>(to), bits_as<uint4>(word));
#else
  *to = word;
#endif
}

// 2^y for y <= ~0, relative error < 2e-7; 0 at -inf, NaN stays.
DAPO_HOST_DEVICE float fast_exp2(float y) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  return r;
#else
  return std::exp2(y);
#endif
}

// Of a vector's elements, the first few whose exponential in the gradient is a polynomial: 1 in 4 on 10.x, where memory
// has grown and the units for ex2 have not. With 2 bytes a logit, and 148 SMs at 1.85 GHz that get 29 bytes a cycle
// each of 8 TB/s, memory takes 0.137 cycles a logit (one read, one write), and 2.03 ex2 at 16 a cycle 0.127: too
// near to overlap. Other instructions are about 11 a logit, 0.086 at 128 a cycle; a polynomial is 10. A share of f takes
// (2.03 - f) / 16 and (11 + 10 f) / 128: 0.119 and 0.096 at 1/8, 0.111 and 0.105 at 1/4, 0.104 and 0.115 at 3/8. Logits
// of 4 bytes leave twice the time, and other GPUs have less memory bandwidth for the same ex2: none.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 != 10
template <class T> constexpr int kPolynomials = 0;
#else
template <class T> constexpr int kPolynomials = sizeof(T) == 2 ? 2 : 0;
#endif

// 2^y for y <= ~0 without ex2, relative error < 3e-6, a hundredth of what rounding to 16 bits takes: y = n + r, a
// minimax polynomial of r in [-1/2, 1/2], n put into the exponent. 0 below -126.5 and at NaN, whose row has a NaN in its
// factor too.
DAPO_HOST_DEVICE float polynomial_exp2(float y) {
  constexpr float kRound = 0x1.8p23f;  // a sum's last bit is then 1
  y = fmaxf(y, -127.0f);
  const float sum = y + kRound, r = y - (sum - kRound);
  float p = fmaf(r, 0.009570101435f, 0.05591786028f);
  p = fmaf(p, r, 0.2402474484f);
  p = fmaf(p, r, 0.6931218147f);
  p = fmaf(p, r, 0.9999992614f);
  return p * bits_as<float>((bits_as<uint32_t>(sum) << 23) + 0x3f800000u);  // at -127 the exponent is empty: 0
}

template <class T> constexpr int kElements = kWord / static_cast<int>(sizeof(T));

// The elements of a word, and back.
template <class T> DAPO_HOST_DEVICE void unpack(const Word& w, float (&x)[kElements<T>]) {
  T elements[kElements<T>];
  std::memcpy(static_cast<void*>(elements), &w, sizeof(w));
  DAPO_UNROLL
  for (int i = 0; i < kElements<T>; ++i) x[i] = widen(elements[i]);
}

template <class T> DAPO_HOST_DEVICE Word pack(const float (&x)[kElements<T>]) {
  T elements[kElements<T>];
  DAPO_UNROLL
  for (int i = 0; i < kElements<T>; ++i) narrow(x[i], &elements[i]);
  return bits_as<Word>(elements);
}

// Elementwise; the other operand where one is NaN.
template <class T> DAPO_HOST_DEVICE Word max_of_words(const Word& a, const Word& b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {  // two at a time
    using Pair = std::conditional_t<std::is_same<T, bf16>::value, __nv_bfloat162, __half2>;
    Word out;
    DAPO_UNROLL
    for (int i = 0; i < 4; ++i) out.x[i] = bits_as<uint32_t>(__hmax2(bits_as<Pair>(a.x[i]), bits_as<Pair>(b.x[i])));
    return out;
  }
#endif
  float x[kElements<T>], y[kElements<T>];
  unpack<T>(a, x);
  unpack<T>(b, y);
  DAPO_UNROLL
  for (int i = 0; i < kElements<T>; ++i) x[i] = fmaxf(x[i], y[i]);
  return pack<T>(x);
}

// A vector of which n elements are there, -inf behind them.
template <class T> DAPO_HOST_DEVICE Word gather(const T* from, int n) {
  float x[kElements<T>];
  DAPO_UNROLL
  for (int i = 0; i < kElements<T>; ++i) x[i] = i < n ? widen(from[i]) : -INFINITY;
  return pack<T>(x);
}

// A vector of which no element is there.
template <class T> DAPO_HOST_DEVICE Word no_logits() { return gather<T>(nullptr, 0); }

// c·tanh(x/c), and its slope 1 − (y/c)² by its value y. c = 0: no cap.
DAPO_HOST_DEVICE float capped(float x, const Softcap& cap) {
  return cap.value == 0.0f ? x : cap.value * tanhf(x * cap.inverse);
}
DAPO_HOST_DEVICE float cap_slope(float y, const Softcap& cap) {
  const float u = y * cap.inverse;
  return cap.value == 0.0f ? 1.0f : 1.0f - u * u;
}

}  // namespace dapo::cuda
