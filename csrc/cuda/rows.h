// What threads do with a row of logits between two barriers, and with its token: add a tile to their statistics, finish
// the row, write gradient. For the host too, where a test runs the threads of a block in a loop; warps are the device's.
#pragma once

#include <cmath>
#include <type_traits>

#include "double_float.h"
#include "element.h"
#include "launch.h"
#include "tiles.h"

namespace dapo::cuda {

template <class T> DAPO_HOST_DEVICE const Word* words_of(const T* x) { return reinterpret_cast<const Word*>(x); }

// Adds thread `thread`'s vectors of tile t of a slice that begins at x, whose words lie at `words`: x, or shared memory.
// kFull: with the entropy's sum, and a softcap if it is not 0.
template <class T, bool kFull>
DAPO_HOST_DEVICE void add_tile(SoftmaxPart& part, const Word* words, const T* x, const Slice& s, int t, int thread,
                               float c, const Softcap& softcap) {
  constexpr int kN = kElements<T>;
  const bool inside = (t + 1) * kTile <= s.n_words;
  // The slice's last tile: all threads leave out the vectors that none of them has.
  const int each = inside ? kPerThread : min_of(kPerThread, ceil_div(s.n - t * kTile * kN, kN * kThreads));
  Word vectors[kPerThread];
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    const int v = tile_index(t, j, thread);
    if (inside || v < s.n_words) {
      vectors[j] = words[v];
    } else {
      vectors[j] = j < each ? gather(x + v * kN, s.n - v * kN) : no_logits<T>();
    }
  }
  const Word most = max_of_words<T>(max_of_words<T>(vectors[0], vectors[1]), max_of_words<T>(vectors[2], vectors[3]));
  float y[kN];
  unpack<T>(most, y);
  float highest = y[0];
  DAPO_UNROLL
  for (int i = 1; i < kN; ++i) highest = fmaxf(highest, y[i]);
  if (kFull) highest = capped(highest, softcap);
  part = lift(part, fmaxf(part.max, highest), c);
  const Base2 base = base2(part.max, c);
  float sum[kPerThread], weighted[kPerThread];
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    sum[j] = weighted[j] = 0.0f;
    if (j >= each) continue;
    unpack<T>(vectors[j], y);
    if (kFull && softcap.value != 0.0f) {
      DAPO_UNROLL
      for (int i = 0; i < kN; ++i) {  // a logit of -inf becomes -softcap; what is no logit stays -inf
        const bool logit = inside || tile_index(t, j, thread) * kN + i < s.n;
        y[i] = logit ? capped(y[i], softcap) : -INFINITY;
      }
    }
    DAPO_UNROLL
    for (int i = 0; i < kN; ++i) {
      const float d = fmaf(y[i], base.scale, -base.top), e = fast_exp2(d);
      sum[j] += e;
      if (kFull) weighted[j] = fmaf(e, fmaxf(d, -200.0f), weighted[j]);  // at -inf: 0 * -200, not 0 * -inf
    }
  }
  part.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  if (kFull) part.weighted += (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]);
}

// Thread `thread`'s statistics of a slice that begins at x.
template <class T, bool kFull>
DAPO_HOST_DEVICE SoftmaxPart thread_part(const T* x, const Slice& s, int thread, float c, const Softcap& softcap) {
  SoftmaxPart part = empty_part();
  for (int t = 0; t < n_tiles(ceil_div(s.n, kElements<T>)); ++t) {
    add_tile<T, kFull>(part, words_of(x), x, s, t, thread, c, softcap);
  }
  return part;
}

// Of the i-th element of a vector.
template <class T, bool kFull>
DAPO_HOST_DEVICE float gradient_element(float x, int i, const RowGradient& g, const Softcap& softcap) {
  const float y = kFull && softcap.value != 0.0f ? capped(x, softcap) : x;
  const float d = fmaf(y, g.base2.scale, -g.base2.top);
  const float p = kPolynomials<T> > 0 && i < kPolynomials<T> ? polynomial_exp2(d) : fast_exp2(d);
  const float slope = kFull ? p * fmaf(g.b, fmaxf(d, -200.0f), g.a) : p * g.a;
  return kFull && softcap.value != 0.0f ? slope * cap_slope(y, softcap) : slope;
}

// A word of logits, the first of them the row's element e, turned into their gradient.
template <class T, bool kFull>
DAPO_HOST_DEVICE Word gradient_word(const Word& in, int e, const RowGradient& g, const Softcap& softcap) {
  constexpr int kN = kElements<T>;
  if (g.zero) return Word{{0, 0, 0, 0}};
  float x[kN];
  unpack<T>(in, x);
  DAPO_UNROLL
  for (int i = 0; i < kN; ++i) x[i] = gradient_element<T, kFull>(x[i], i, g, softcap);
  const int at = static_cast<int>(g.target) - e;
  if (at >= 0 && at < kN) {
    DAPO_UNROLL
    for (int i = 0; i < kN; ++i) x[i] = i == at ? g.at_target : x[i];
  }
  return pack<T>(x);
}

// A thread's words w = first + j stride of the slice that begins at `out`. All loads stand before the first store.
// kShared: `words` is shared memory, and nobody reads the row's from the cache. Then plain stores: with the others
// cluster_loss spills.
template <class T, bool kFull, bool kShared>
DAPO_HOST_DEVICE void write_words(T* out, const Word* words, const Slice& s, int first, int stride,
                                  const RowGradient& g, const Softcap& softcap) {
  Word in[kPerThread];
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    const int w = first + j * stride;
    if (w < s.n_words && !g.zero) in[j] = kShared ? words[w] : load_last(words + w);
  }
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    const int w = first + j * stride, e = w * kElements<T>;
    if (w >= s.n_words) continue;
    const Word gradient = gradient_word<T, kFull>(in[j], s.first + e, g, softcap);
    if (kShared) {
      *reinterpret_cast<Word*>(out + e) = gradient;
    } else {
      store_last(reinterpret_cast<Word*>(out + e), gradient);
    }
  }
}

// A thread's elements of those that lie in no word.
template <class T, bool kFull>
DAPO_HOST_DEVICE void write_rest(T* out, const T* x, const Slice& s, int thread, int n_threads, const RowGradient& g,
                                 const Softcap& softcap) {
  for (int e = s.n_words * kElements<T> + thread; e < s.n; e += n_threads) {
    float y = 0.0f;
    if (!g.zero) {
      const int i = e & (kElements<T> - 1);
      y = s.first + e == g.target ? g.at_target : gradient_element<T, kFull>(widen(x[e]), i, g, softcap);
    }
    narrow(y, out + e);
  }
}

// A thread's share of the gradient of a slice that begins at x, or of zeros; `out` may be x. Backwards: what was read
// last is still in the L2 cache.
template <class T, bool kFull>
DAPO_HOST_DEVICE void write_gradient(T* out, const T* x, const Slice& s, int thread, int n_threads,
                                     const RowGradient& g, const Softcap& softcap) {
  const int tile = kPerThread * n_threads;
  for (int t = ceil_div(s.n_words, tile) - 1; t >= 0; --t) {
    write_words<T, kFull, false>(out, words_of(x), s, t * tile + thread, n_threads, g, softcap);
  }
  write_rest<T, kFull>(out, x, s, thread, n_threads, g, softcap);
}

// What gradient_of computed from the capped target, times the cap's slope there.
DAPO_HOST_DEVICE RowGradient through_cap(RowGradient g, float capped_target, const Softcap& softcap) {
  g.at_target *= cap_slope(capped_target, softcap);
  return g;
}

template <class T> DAPO_HOST_DEVICE T* row_of(const Rows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + rows.offset(row);
}

DAPO_HOST_DEVICE float base2_scale_of(const RowArgs& args, int64_t row) {
  return args.in.tokens.temperatures == nullptr ? args.c : base2_scale<DoubleFloat>(args.in.tokens.temperatures[row]);
}

// 0 where the row does not hold it.
DAPO_HOST_DEVICE float target_logit(const Operands& in, int64_t row) {
  if (in.tokens.target_ids[row] < 0) return 0.0f;
  const int64_t at = in.logits.offset(row) + in.tokens.target_ids[row];
  const void* data = in.logits.data;
  const float x = in.logits.dtype == Dtype::f32    ? static_cast<const float*>(data)[at]
                  : in.logits.dtype == Dtype::bf16 ? widen(static_cast<const bf16*>(data)[at])
                                                   : widen(static_cast<const f16*>(data)[at]);
  return capped(x, in.softcap);
}

DAPO_HOST_DEVICE RowGradient finish_dead_row(const LossArgs& args, int64_t row) {
  write_dead(args.out, row);
  args.losses[row] = 0.0;
  return zero_gradient();
}

// One thread: results of a live row, where `writes`; returns the gradient row. kFull: with an entropy, perhaps.
template <bool kFull>
DAPO_HOST_DEVICE RowGradient finish_row(const LossArgs& args, int64_t row, const TokenValues& token, float x_target,
                                        float c, const SoftmaxPart& whole, bool writes) {
  const RowLoss result = finish_loss<DoubleFloat>(token, x_target, args.in.tokens.tau(row), c, args.objective,
                                                  kFull ? args.entropy_coef : 0.0f,
                                                  kFull && args.out.entropy != nullptr, whole);
  if (writes) {
    write_loss(args.out, row, result);
    args.losses[row] = result.weighted;
  }
  return through_cap(result.gradient, x_target, args.in.softcap);
}

// The same while the row's logits are still in memory.
DAPO_HOST_DEVICE RowGradient finish_row(const LossArgs& args, int64_t row, const SoftmaxPart& whole) {
  return finish_row<true>(args, row, token_values(args.in.tokens, row), target_logit(args.in, row),
                          base2_scale_of(args, row), whole, true);
}

// What there is to say of a row: its loss and the gradient still to be written, or without `losses` its statistics.
DAPO_HOST_DEVICE void finish(const LossArgs& args, int64_t row, const SoftmaxPart& whole) {
  const bool live = args.in.tokens.live[row];
  if (args.losses != nullptr) {
    args.gradients[row] = live ? finish_row(args, row, whole) : finish_dead_row(args, row);
  } else if (live) {
    write_stats<DoubleFloat>(args.out, row, target_logit(args.in, row), base2_scale_of(args, row), whole);
  } else {
    write_dead(args.out, row);
  }
}

// From the statistics of an earlier pass and what arrives at its results; of a dead row nothing is read.
DAPO_HOST_DEVICE RowGradient planned_gradient(const RowArgs& args, int64_t row, const GradInputs& from) {
  if (!args.in.tokens.live[row]) return zero_gradient();
  const float x_target = target_logit(args.in, row);
  const RowGradient g =
      gradient_of<DoubleFloat>(x_target, args.in.tokens.target_ids[row], args.in.tokens.tau(row),
                               base2_scale_of(args, row), from.norm[2 * row], from.norm[2 * row + 1],
                               from.d_logprobs[row], from.d_entropy ? from.d_entropy[row] : 0.0f,
                               from.d_entropy ? from.entropy[row] : 0.0f);
  return through_cap(g, x_target, args.in.softcap);
}

// Calls launch(T*, bool constant kFull) for the dtype and variant of `args`.
template <class Launch> void for_variant(const RowArgs& args, Launch launch) {
  const auto both = [&](auto* element) {
    args.full ? launch(element, std::true_type()) : launch(element, std::false_type());
  };
  switch (args.in.logits.dtype) {
    case Dtype::f32: return both(static_cast<float*>(nullptr));
    case Dtype::bf16: return both(static_cast<bf16*>(nullptr));
    case Dtype::f16: return both(static_cast<f16*>(nullptr));
  }
}

#if defined(__CUDACC__)

// Parts of kWidth neighbouring lanes: the maximum first, so that each part is lifted once. Every lane gets the same bits,
// because a + b == b + a.
template <int kWidth> __device__ inline SoftmaxPart merge_lanes(SoftmaxPart part, float c) {
  float max = part.max;
  DAPO_UNROLL
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lanes));
  part = lift(part, max, c);
  DAPO_UNROLL
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) {
    part.sum += __shfl_xor_sync(0xffffffffu, part.sum, lanes);
    part.weighted += __shfl_xor_sync(0xffffffffu, part.weighted, lanes);
  }
  return part;
}

// A whole warp merges the parts of a row's slices.
__device__ inline SoftmaxPart merge_slices(const SoftmaxPart* parts, int n, int lane, float c) {
  SoftmaxPart part = lane < n ? parts[lane] : empty_part();
  for (int k = lane + kWarp; k < n; k += kWarp) part = merge(part, parts[k], c);
  return merge_lanes<kWarp>(part, c);
}

#endif

}  // namespace dapo::cuda
