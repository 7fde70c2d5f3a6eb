// One vector vocabulary for AVX-512, AVX2 and plain C++, chosen by the flags this translation unit is compiled with.
//
//   vf            kWidth floats
//   Group         2 * kWidth logits as two vectors; which element sits where is the dtype's own business, and the same
//                 in load and store
//   exp2_nonpos   2^y for y <= ~0 by a polynomial of the given degree: 0 at -inf, NaN stays NaN
//   keep, kept    exponentials in [0, 2) in the place of logits of the same size. Sign and highest exponent bit are zero,
//                 so 16 bits hold a bfloat16's exponent and two more bits of mantissa: 2^-11 off, where the gradient's
//                 rounding to bfloat16 is 2^-9
//
// Everything is in a namespace per instruction set: two translation units must not share an inline function.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dapo {
namespace DAPO_ISA {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// 2^f on [0, 1), 1 at 0, minimax. Relative error before rounding: 3e-6, 1e-7.
constexpr float kExp2[6][6] = {
    {},
    {},
    {},
    {},
    {1.0f, 0.6930447221f, 0.2412806451f, 0.05224204808f, 0.01342681143f},
    {1.0f, 0.6931510568f, 0.2401656508f, 0.05579930171f, 0.009014884941f, 0.001868956373f},
};

#if defined(__AVX512F__)

constexpr int kWidth = 16;
using vf = __m512;

static inline vf splat(float x) { return _mm512_set1_ps(x); }
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline void stream(void* p, vf x) { _mm512_stream_ps(static_cast<float*>(p), x); }  // aligned
static inline void stream_fence() { _mm_sfence(); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf affine(vf x, vf a, vf b) { return fma(x, a, b); }
static inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
static inline float sum_of(vf x) { return _mm512_reduce_add_ps(x); }
static inline float max_of(vf x) { return _mm512_reduce_max_ps(x); }

template <int kDegree> static inline vf exp2_nonpos(vf y) {
  const vf f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // y - floor(y); 0 at -inf
  vf p = splat(kExp2[kDegree][kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) p = fma(p, f, splat(kExp2[kDegree][i]));
  return _mm512_scalef_ps(p, y);  // p * 2^floor(y)
}

struct Group { vf a, b; };

static inline Group load_group(const float* p) { return {load(p), load(p + 16)}; }
static inline __mmask32 first(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1u; }
static inline Group load_tail(const float* p, int n, float fill) {
  const __mmask32 m = first(n);
  return {_mm512_mask_loadu_ps(splat(fill), (__mmask16)m, p),
          _mm512_mask_loadu_ps(splat(fill), (__mmask16)(m >> 16), p + 16)};
}
static inline void store_group(float* p, Group g) { store(p, g.a); store(p + 16, g.b); }
static inline void store_tail(float* p, Group g, int n) {
  const __mmask32 m = first(n);
  _mm512_mask_storeu_ps(p, (__mmask16)m, g.a);
  _mm512_mask_storeu_ps(p + 16, (__mmask16)(m >> 16), g.b);
}

// bfloat16: a holds the even elements, b the odd ones; no shuffle on the way in.
static inline Group widen(__m512i w, bf16) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)))};
}
// To nearest even. Without the instruction, a NaN whose low 16 bits are clear stays one: that of a widened bfloat16, or NAN.
static inline __m512i narrow(Group g, bf16) {
#if defined(__AVX512BF16__)
  alignas(64) static const uint16_t kInterleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), (__m512i)_mm512_cvtne2ps_pbh(g.b, g.a));
#else
  const auto round = [](vf x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  };
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(round(g.a), 16), round(g.b));
#endif
}
static inline Group widen(__m512i w, f16) {
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(w)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1))};
}
static inline __m512i narrow(Group g, f16) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(g.a, kNearest)), _mm512_cvtps_ph(g.b, kNearest), 1);
}
static inline __m512i pack(Group e) {
  const __m512i half = _mm512_set1_epi32(1 << 13), high = _mm512_set1_epi32((int)0xffff0000u);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(e.a), half), 14);
  const __m512i b = _mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(e.b), half), 2);
  return _mm512_or_si512(a, _mm512_and_si512(b, high));
}
static inline Group unpack(__m512i w) {
  const __m512i bits = _mm512_set1_epi32(0x3fffc000);
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(w, 14), bits)),
          _mm512_castsi512_ps(_mm512_and_si512(_mm512_srli_epi32(w, 2), bits))};
}
static inline uint16_t half_bits(float fill, bf16) {
  uint32_t bits;
  std::memcpy(&bits, &fill, 4);
  return (uint16_t)(bits >> 16);
}
static inline uint16_t half_bits(float fill, f16) { return _cvtss_sh(fill, _MM_FROUND_TO_NEAREST_INT); }

static inline void keep_group(bf16* p, Group e) { _mm512_storeu_si512(p, pack(e)); }
static inline void keep_tail(bf16* p, Group e, int n) { _mm512_mask_storeu_epi16(p, first(n), pack(e)); }
static inline Group kept_group(const bf16* p) { return unpack(_mm512_loadu_si512(p)); }
static inline Group kept_tail(const bf16* p, int n) { return unpack(_mm512_maskz_loadu_epi16(first(n), p)); }

template <class T> static inline Group load_group(const T* p) { return widen(_mm512_loadu_si512(p), T{}); }
template <class T> static inline Group load_tail(const T* p, int n, float fill) {
  return widen(_mm512_mask_loadu_epi16(_mm512_set1_epi16((short)half_bits(fill, T{})), first(n), p), T{});
}
template <class T> static inline void store_group(T* p, Group g) { _mm512_storeu_si512(p, narrow(g, T{})); }
template <class T> static inline void store_tail(T* p, Group g, int n) {
  _mm512_mask_storeu_epi16(p, first(n), narrow(g, T{}));
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
using vf = __m256;

static inline vf splat(float x) { return _mm256_set1_ps(x); }
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
static inline void stream(void* p, vf x) { _mm256_stream_ps(static_cast<float*>(p), x); }  // aligned
static inline void stream_fence() { _mm_sfence(); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf affine(vf x, vf a, vf b) { return fma(x, a, b); }
static inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b where either is NaN
static inline float sum_of(vf x) {
  const __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 q = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float max_of(vf x) {
  const __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 q = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

// 2^f on [-0.5, 0.5], 1 at 0, minimax, as accurate as kExp2.
constexpr float kExp2Near[6][6] = {
    {},
    {},
    {},
    {},
    {1.0f, 0.6931241933f, 0.240240986f, 0.05590642517f, 0.009582853785f},
    {1.0f, 0.6931469775f, 0.2402224207f, 0.05550733843f, 0.009671513433f, 0.001326470468f},
};

template <int kDegree> static inline vf exp2_nonpos(vf y) {
  y = max(splat(-127.0f), y);  // 2^-127 comes out as 0: its exponent field is empty
  const vf big = splat(0x1.8p23f + 127.0f);
  const vf t = add(y, big);  // rounds y to an integer n; n + 127 is in the low bits
  const vf f = _mm256_sub_ps(y, _mm256_sub_ps(t, big));
  vf p = splat(kExp2Near[kDegree][kDegree]);
  for (int i = kDegree - 1; i >= 0; --i) p = fma(p, f, splat(kExp2Near[kDegree][i]));
  return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)));  // p * 2^n
}

struct Group { vf a, b; };

static inline Group load_group(const float* p) { return {load(p), load(p + 8)}; }
static inline void store_group(float* p, Group g) { store(p, g.a); store(p + 8, g.b); }

// bfloat16: a holds the even elements, b the odd ones; no shuffle on the way in.
static inline Group load_group(const bf16* p) {
  const __m256i w = _mm256_loadu_si256((const __m256i*)p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000u)))};
}
// To nearest even, in the upper half. A NaN whose low 16 bits are clear stays one: that of a widened bfloat16, or NAN.
static inline __m256i round_bf16(vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}
static inline void store_group(bf16* p, Group g) {
  const __m256i even = _mm256_srli_epi32(round_bf16(g.a), 16);
  _mm256_storeu_si256((__m256i*)p, _mm256_blend_epi16(even, round_bf16(g.b), 0xaa));
}
static inline void keep_group(bf16* p, Group e) {
  const __m256i half = _mm256_set1_epi32(1 << 13);
  const __m256i a = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(e.a), half), 14);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(e.b), half), 2);
  _mm256_storeu_si256((__m256i*)p, _mm256_blend_epi16(a, b, 0xaa));
}
static inline Group kept_group(const bf16* p) {
  const __m256i w = _mm256_loadu_si256((const __m256i*)p), bits = _mm256_set1_epi32(0x3fffc000);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(w, 14), bits)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_srli_epi32(w, 2), bits))};
}
static inline Group load_group(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline void store_group(f16* p, Group g) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(g.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(g.b, _MM_FROUND_TO_NEAREST_INT));
}
static inline uint16_t half_bits(float fill, f16) { return (uint16_t)_cvtss_sh(fill, _MM_FROUND_TO_NEAREST_INT); }

#else

constexpr int kWidth = 8;
struct vf { float v[kWidth]; };

#define DAPO_LANES for (int i = 0; i < kWidth; ++i)
static inline vf splat(float x) { vf r; DAPO_LANES r.v[i] = x; return r; }
static inline vf load(const float* p) { vf r; DAPO_LANES r.v[i] = p[i]; return r; }
static inline void store(float* p, vf x) { DAPO_LANES p[i] = x.v[i]; }
static inline void stream(void* p, vf x) { std::memcpy(p, x.v, sizeof x.v); }
static inline void stream_fence() {}
static inline vf add(vf a, vf b) { DAPO_LANES a.v[i] += b.v[i]; return a; }
static inline vf mul(vf a, vf b) { DAPO_LANES a.v[i] *= b.v[i]; return a; }
static inline vf fma(vf a, vf b, vf c) { DAPO_LANES a.v[i] = a.v[i] * b.v[i] + c.v[i]; return a; }
// In double: without a fused multiply-add the rounded product of a logit at 1e4 would cost its exponent three digits.
static inline vf affine(vf x, vf a, vf b) { DAPO_LANES x.v[i] = (float)((double)x.v[i] * a.v[i] + b.v[i]); return x; }
static inline vf max(vf a, vf b) { DAPO_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline float sum_of(vf x) { float s = 0.0f; DAPO_LANES s += x.v[i]; return s; }
static inline float max_of(vf x) { float m = x.v[0]; DAPO_LANES m = x.v[i] > m ? x.v[i] : m; return m; }

template <int kDegree> static inline vf exp2_nonpos(vf y) {
  vf r;
  DAPO_LANES {
    const float bounded = y.v[i] < -127.0f ? -127.0f : y.v[i];  // 2^-127 comes out as 0: its exponent field is empty
    const int32_t cut = (int32_t)(bounded != bounded ? 0.0f : bounded);
    const int32_t n = cut - (bounded < (float)cut ? 1 : 0);
    const float f = bounded - (float)n;
    float p = kExp2[kDegree][kDegree];
    for (int k = kDegree - 1; k >= 0; --k) p = p * f + kExp2[kDegree][k];
    const int32_t bits = (n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    r.v[i] = p * power;
  }
  return r;
}

static inline float widen(float x) { return x; }
static inline float widen(bf16 h) {
  const uint32_t bits = (uint32_t)h.bits << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline float widen(f16 h) {
  const uint32_t sign = (uint32_t)(h.bits & 0x8000u) << 16, exponent = (h.bits >> 10) & 31u, mantissa = h.bits & 1023u;
  float x;
  if (exponent == 0) {
    x = (float)mantissa * 5.9604644775390625e-08f;  // subnormal: mantissa * 2^-24
    return sign ? -x : x;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  out->bits = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static inline void narrow(float x, f16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.0f)) {
    out->bits = sign | (x != x ? 0x7e00 : 0x7c00);
  } else if (magnitude < 6.103515625e-05f) {  // subnormal: the float adder rounds for us
    out->bits = sign | (uint16_t)std::nearbyintf(magnitude * 16777216.0f);
  } else {
    const uint32_t m = bits & 0x7fffffffu;
    out->bits = sign | (uint16_t)((m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13);
  }
}

struct Group { vf a, b; };

template <class T> static inline Group load_group(const T* p) {
  Group g;
  DAPO_LANES { g.a.v[i] = widen(p[i]); g.b.v[i] = widen(p[i + kWidth]); }
  return g;
}
template <class T> static inline void store_group(T* p, Group g) {
  DAPO_LANES { narrow(g.a.v[i], p + i); narrow(g.b.v[i], p + i + kWidth); }
}
static inline uint16_t pack(float e) {
  uint32_t bits;
  std::memcpy(&bits, &e, 4);
  return (uint16_t)((bits + (1u << 13)) >> 14);
}
static inline float unpack(uint16_t w) {
  const uint32_t bits = (uint32_t)w << 14;
  float e;
  std::memcpy(&e, &bits, 4);
  return e;
}
static inline void keep_group(bf16* p, Group e) {
  DAPO_LANES { p[i].bits = pack(e.a.v[i]); p[i + kWidth].bits = pack(e.b.v[i]); }
}
static inline Group kept_group(const bf16* p) {
  Group e;
  DAPO_LANES { e.a.v[i] = unpack(p[i].bits); e.b.v[i] = unpack(p[i + kWidth].bits); }
  return e;
}
static inline uint16_t half_bits(float fill, f16) { f16 h; narrow(fill, &h); return h.bits; }
#undef DAPO_LANES

#endif

#if !defined(__AVX512F__)
static inline uint16_t half_bits(float fill, bf16) {
  uint32_t bits;
  std::memcpy(&bits, &fill, 4);
  return (uint16_t)(bits >> 16);
}
static inline float make(float fill, float) { return fill; }
template <class T> static inline T make(float fill, T t) { return T{half_bits(fill, t)}; }

template <class T> static inline Group load_tail(const T* p, int n, float fill) {
  T whole[2 * kWidth];
  for (int i = 0; i < 2 * kWidth; ++i) whole[i] = i < n ? p[i] : make(fill, T{});
  return load_group(whole);
}
template <class T> static inline void store_tail(T* p, Group g, int n) {
  T whole[2 * kWidth];
  store_group(whole, g);
  std::memcpy(p, whole, (size_t)n * sizeof(T));
}
static inline void keep_tail(bf16* p, Group e, int n) {
  bf16 whole[2 * kWidth];
  keep_group(whole, e);
  std::memcpy(p, whole, (size_t)n * sizeof(bf16));
}
static inline Group kept_tail(const bf16* p, int n) {
  bf16 whole[2 * kWidth] = {};
  std::memcpy(whole, p, (size_t)n * sizeof(bf16));
  return kept_group(whole);
}
#endif

static inline void keep_group(float* p, Group e) { store_group(p, e); }
static inline void keep_tail(float* p, Group e, int n) { store_tail(p, e, n); }
static inline Group kept_group(const float* p) { return load_group(p); }
static inline Group kept_tail(const float* p, int n) { return load_tail(p, n, 0.0f); }
// In a group of float16 the halves lie one behind the other, which a tail could not be cut from: nothing is kept.
static inline void keep_group(f16*, Group) {}
static inline void keep_tail(f16*, Group, int) {}
static inline Group kept_group(const f16* p) { return load_group(p); }
static inline Group kept_tail(const f16* p, int n) { return load_tail(p, n, 0.0f); }

constexpr int kGroup = 2 * kWidth;

}  // namespace DAPO_ISA
}  // namespace dapo
