// Compiled once per instruction set: DAPO_ISA names the namespace, the compiler flags choose the vectors of simd.h.
#include "row_kernels.h"

#include "simd.h"

namespace dapo {
namespace DAPO_ISA {

// Degrees of the polynomial for 2^y. Degree 5 is 1e-7 off, about as much as one rounding to float32. Statistics need
// it whatever the dtype of the logits is, because log-probs are float32. The rounding of a gradient to 16 bits is a
// thousand times coarser than degree 4.
constexpr int kStatsDegree = 5;
template <class T> constexpr int kGradDegree = sizeof(T) == 4 ? 5 : 4;

static inline Group affine(Group g, vf c, vf shift) { return {affine(g.a, c, shift), affine(g.b, c, shift)}; }

template <class T> static inline float block_max(const T* x, int64_t n) {
  const vf low = splat(-INFINITY);
  vf m[4] = {low, low, low, low};
  int64_t i = 0;
  for (; i + 2 * kGroup <= n; i += 2 * kGroup) {
    const Group g = load_group(x + i), h = load_group(x + i + kGroup);
    m[0] = max(g.a, m[0]);
    m[1] = max(g.b, m[1]);
    m[2] = max(h.a, m[2]);
    m[3] = max(h.b, m[3]);
  }
  for (; i < n; i += kGroup) {
    const Group g = n - i >= kGroup ? load_group(x + i) : load_tail(x + i, (int)(n - i), -INFINITY);
    m[0] = max(g.a, m[0]);
    m[1] = max(g.b, m[1]);
  }
  return max_of(max(max(m[0], m[1]), max(m[2], m[3])));
}

// Asks for the cache lines of one group of logits. Past the end of a buffer this is harmless.
constexpr int kIntoL1 = 3, kIntoL2 = 2;  // as __builtin_prefetch counts
template <int kLevel, class T> static inline void prefetch_group(const T* p) {
  for (size_t byte = 0; byte < kGroup * sizeof(T); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + byte, 0, kLevel);
  }
}

struct Sums { vf sum_a, sum_b, weighted_a, weighted_b; };

template <int kDegree, bool kWeighted> static inline Group exponentials(Group g, vf c, vf shift, Sums& s) {
  const Group y = affine(g, c, shift);
  const Group e = {exp2_nonpos<kDegree>(y.a), exp2_nonpos<kDegree>(y.b)};
  s.sum_a = add(s.sum_a, e.a);
  s.sum_b = add(s.sum_b, e.b);
  if (kWeighted) {  // at -inf: 0 * -200, not 0 * -inf
    s.weighted_a = fma(e.a, max(splat(-200.0f), y.a), s.weighted_a);
    s.weighted_b = fma(e.b, max(splat(-200.0f), y.b), s.weighted_b);
  }
  return e;
}

template <class T, bool kWeighted, bool kKeep> static SoftmaxPart block_stats(T* x, int64_t n, float c, const T* ahead) {
  const float most = block_max(x, n);
  const Base2 base = base2(most, c);
  const vf scale = splat(base.scale), shift = splat(-base.top);
  Sums s = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    prefetch_group<kIntoL2>(ahead + i);
    prefetch_group<kIntoL1>(x + n + i);  // the next block, whose maximum comes next
    const Group e = exponentials<kStatsDegree, kWeighted>(load_group(x + i), scale, shift, s);
    if (kKeep) keep_group(x + i, e);
  }
  if (i < n) {
    const Group e = exponentials<kStatsDegree, kWeighted>(load_tail(x + i, (int)(n - i), -INFINITY), scale, shift, s);
    if (kKeep) keep_tail(x + i, e, (int)(n - i));
  }
  return {most, sum_of(add(s.sum_a, s.sum_b)), sum_of(add(s.weighted_a, s.weighted_b))};
}

template <class T> SoftmaxPart stats(void* data, int64_t n, float c, bool weighted, bool keep, const void* later) {
  T* x = static_cast<T*>(data);
  const T* ahead = static_cast<const T*>(later);
  if (keep) return weighted ? block_stats<T, true, true>(x, n, c, ahead) : block_stats<T, false, true>(x, n, c, ahead);
  return weighted ? block_stats<T, true, false>(x, n, c, ahead) : block_stats<T, false, false>(x, n, c, ahead);
}

// Rounding to bfloat16 by integer arithmetic would lose a NaN whose low 16 bits are set (simd.h).
static inline float usual_nan(float x) { return x == x ? x : NAN; }

template <class T> void scale(void* data, int64_t n, float factor) {
  T* x = static_cast<T*>(data);
  const vf f = splat(usual_nan(factor));
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    const Group e = kept_group(x + i);
    store_group(x + i, Group{mul(e.a, f), mul(e.b, f)});
  }
  if (i < n) {
    const Group e = kept_tail(x + i, (int)(n - i));
    store_tail(x + i, Group{mul(e.a, f), mul(e.b, f)}, (int)(n - i));
  }
}

template <int kDegree, bool kSlope> static inline vf grad_of(vf y, vf a, vf b) {
  const vf p = exp2_nonpos<kDegree>(y);
  return mul(p, kSlope ? fma(b, max(splat(-200.0f), y), a) : a);
}

static inline void stream_group(float* p, Group g) {
  stream(p, g.a);
  stream(p + kWidth, g.b);
}
template <class T> static inline void stream_group(T* p, Group g) { store_group(p, g); }

template <class T, bool kSlope>
static void block_grad(const T* x, T* out, int64_t n, Base2 base, float a_, float b_, const T* ahead, bool streams) {
  constexpr auto gradient = grad_of<kGradDegree<T>, kSlope>;
  const vf scale = splat(base.scale), shift = splat(-base.top), a = splat(usual_nan(a_)), b = splat(usual_nan(b_));
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    prefetch_group<kIntoL2>(ahead + i);
    const Group y = affine(load_group(x + i), scale, shift);
    const Group g = {gradient(y.a, a, b), gradient(y.b, a, b)};
    streams ? stream_group(out + i, g) : store_group(out + i, g);
  }
  if (i < n) {
    const int rest = (int)(n - i);
    const Group y = affine(load_tail(x + i, rest, -INFINITY), scale, shift);
    store_tail(out + i, Group{gradient(y.a, a, b), gradient(y.b, a, b)}, rest);
  }
}

template <class T>
void grad(const void* x, void* out, int64_t n, Base2 base, float a, float b, const void* ahead, bool past_caches) {
  const T *in = static_cast<const T*>(x), *next = static_cast<const T*>(ahead);
  T* to = static_cast<T*>(out);
  const bool streams = sizeof(T) == 4 && past_caches && reinterpret_cast<uintptr_t>(out) % (kWidth * 4) == 0;
  b == 0.0f ? block_grad<T, false>(in, to, n, base, a, b, next, streams)
            : block_grad<T, true>(in, to, n, base, a, b, next, streams);
}

template <class T> float get(const void* x, int64_t i) {
  float whole[kGroup];
  const Group g = load_tail(static_cast<const T*>(x) + i, 1, 0.0f);
  store(whole, g.a);
  return whole[0];
}

template <class T> void set(void* x, int64_t i, float value) {
  store_tail(static_cast<T*>(x) + i, Group{splat(usual_nan(value)), splat(0.0f)}, 1);
}

static void stream_zeros(void* x, int64_t bytes) {
  char* p = static_cast<char*>(x);
  const int64_t unaligned = -reinterpret_cast<intptr_t>(p) & (kWidth * 4 - 1);
  const int64_t head = unaligned < bytes ? unaligned : bytes;
  std::memset(p, 0, head);
  for (p += head, bytes -= head; bytes >= kWidth * 4; bytes -= kWidth * 4, p += kWidth * 4) stream(p, splat(0.0f));
  std::memset(p, 0, bytes);
}

// Plain loops: every compiler turns these into vectors.
static inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static void add_split(uint16_t* __restrict high, uint16_t* __restrict low, const uint16_t* __restrict part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float sum = as_float((uint32_t)high[i] << 16 | low[i]) + as_float((uint32_t)part[i] << 16);
    uint32_t bits;
    std::memcpy(&bits, &sum, 4);
    high[i] = (uint16_t)(bits >> 16);
    low[i] = (uint16_t)bits;
  }
}

static void round_split(uint16_t* __restrict high, const uint16_t* __restrict low, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = (uint32_t)high[i] << 16 | low[i];
    const uint32_t up = (bits + 0x7fffu + (high[i] & 1u)) >> 16;
    high[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : up);  // a NaN must not round to infinity
  }
}

template <class T> constexpr BlockKernels kernels() { return {stats<T>, scale<T>, grad<T>, get<T>, set<T>}; }

}  // namespace DAPO_ISA

#define DAPO_JOIN_(a, b) a##b
#define DAPO_JOIN(a, b) DAPO_JOIN_(a, b)
#define DAPO_STRING_(a) #a
#define DAPO_STRING(a) DAPO_STRING_(a)

const RowKernels& DAPO_JOIN(row_kernels_, DAPO_ISA)() {
  using namespace DAPO_ISA;
  static const RowKernels table = {DAPO_STRING(DAPO_ISA), {kernels<float>(), kernels<bf16>(), kernels<f16>()},
                                   stream_zeros, stream_fence, add_split, round_split};
  return table;
}

}  // namespace dapo
