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

namespace dapo {
namespace cuda {

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

DAPO_HOST_DEVICE float widen(float x) { return x; }
DAPO_HOST_DEVICE float widen(bf16 x) { return __bfloat162float(x); }
DAPO_HOST_DEVICE float widen(f16 x) { return __half2float(x); }
DAPO_HOST_DEVICE void narrow(float x, float* out) { *out = x; }
DAPO_HOST_DEVICE void narrow(float x, bf16* out) { *out = __float2bfloat16_rn(x); }
DAPO_HOST_DEVICE void narrow(float x, f16* out) { *out = __float2half_rn(x); }

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

// The two low bits of `shift` bytes to the right of high:low. Shifts are 0 or 2: elements are 2 or 4 bytes long.
DAPO_HOST_DEVICE uint32_t funnel(uint32_t low, uint32_t high, int shift) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, 8 * (shift & 3));
#else
  const int bits = 8 * (shift & 3);
  return bits == 0 ? low : low >> bits | high << (32 - bits);
#endif
}

// Bytes [phase, phase + 16) of two neighbouring words. Registers cannot be indexed, so: by two, by one, by half.
DAPO_HOST_DEVICE Word straddle(const Word& low, const Word& high, int phase) {
  const uint32_t cat[8] = {low.x[0], low.x[1], low.x[2], low.x[3], high.x[0], high.x[1], high.x[2], high.x[3]};
  uint32_t by_two[6], by_one[5];
  Word out;
  DAPO_UNROLL
  for (int i = 0; i < 6; ++i) by_two[i] = phase & 8 ? cat[i + 2] : cat[i];
  DAPO_UNROLL
  for (int i = 0; i < 5; ++i) by_one[i] = phase & 4 ? by_two[i + 1] : by_two[i];
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) out.x[i] = funnel(by_one[i], by_one[i + 1], phase);
  return out;
}

template <class T> constexpr int kElements = kWord / static_cast<int>(sizeof(T));

// The elements of a word, and back.
DAPO_HOST_DEVICE void unpack(const Word& w, float (&x)[4], const float*) {
  std::memcpy(x, &w, sizeof(w));
}
DAPO_HOST_DEVICE Word pack(const float (&x)[4], const float*) {
  Word w;
  std::memcpy(&w, x, sizeof(w));
  return w;
}

#if defined(__CUDACC__)

DAPO_HOST_DEVICE void unpack(const Word& w, float (&x)[8], const bf16*) {
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = bits_as<float>(w.x[i] << 16);
    x[2 * i + 1] = bits_as<float>(w.x[i] & 0xffff0000u);
  }
}
DAPO_HOST_DEVICE Word pack(const float (&x)[8], const bf16*) {
  Word w;
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) {
    w.x[i] = bits_as<uint32_t>(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1]));
  }
  return w;
}
DAPO_HOST_DEVICE void unpack(const Word& w, float (&x)[8], const f16*) {
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float2 both = __half22float2(bits_as<__half2>(w.x[i]));
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}
DAPO_HOST_DEVICE Word pack(const float (&x)[8], const f16*) {
  Word w;
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) {
    w.x[i] = bits_as<uint32_t>(__floats2half2_rn(x[2 * i], x[2 * i + 1]));
  }
  return w;
}

#else

template <class T> void unpack(const Word& w, float (&x)[8], const T*) {
  T elements[8];
  std::memcpy(elements, &w, sizeof(w));
  for (int i = 0; i < 8; ++i) x[i] = widen(elements[i]);
}
template <class T> Word pack(const float (&x)[8], const T*) {
  T elements[8];
  Word w;
  for (int i = 0; i < 8; ++i) narrow(x[i], &elements[i]);
  std::memcpy(&w, elements, sizeof(w));
  return w;
}

#endif

// Elementwise; the other operand where one is NaN.
template <class T> DAPO_HOST_DEVICE Word max_of_words(const Word& a, const Word& b) {
  Word out;
#if defined(__CUDA_ARCH__)
  DAPO_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out.x[i] = __float_as_uint(fmaxf(__uint_as_float(a.x[i]), __uint_as_float(b.x[i])));
    } else {  // two at a time
      using Pair = std::conditional_t<std::is_same<T, bf16>::value, __nv_bfloat162, __half2>;
      out.x[i] = bits_as<uint32_t>(__hmax2(bits_as<Pair>(a.x[i]), bits_as<Pair>(b.x[i])));
    }
  }
#else
  constexpr int kN = kElements<T>;
  float x[kN], y[kN];
  unpack(a, x, static_cast<const T*>(nullptr));
  unpack(b, y, static_cast<const T*>(nullptr));
  for (int i = 0; i < kN; ++i) x[i] = fmaxf(x[i], y[i]);
  out = pack(x, static_cast<const T*>(nullptr));
#endif
  return out;
}

// The first n elements of a word, -inf behind them.
template <class T> DAPO_HOST_DEVICE Word pad_word(const Word& word, int n) {
  constexpr int kN = kElements<T>;
  float x[kN];
  unpack(word, x, static_cast<const T*>(nullptr));
  DAPO_UNROLL
  for (int i = 0; i < kN; ++i) x[i] = i < n ? x[i] : -INFINITY;
  return pack(x, static_cast<const T*>(nullptr));
}

// c·tanh(x/c), and its slope 1 − (y/c)² by its value y. c = 0: no cap.
DAPO_HOST_DEVICE float capped(float x, const Softcap& cap) {
  return cap.value == 0.0f ? x : cap.value * tanhf(x * cap.inverse);
}
DAPO_HOST_DEVICE float cap_slope(float y, const Softcap& cap) {
  const float u = y * cap.inverse;
  return cap.value == 0.0f ? 1.0f : 1.0f - u * u;
}

}  // namespace cuda
}  // namespace dapo
