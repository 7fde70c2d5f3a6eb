// What one thread does between two barriers of a row kernel: add a tile to its statistics, write words of gradient.
// Compiles for the host too: a test runs the threads of a cluster in a loop.
#pragma once

#include <cmath>

#include "../row_math.h"
#include "element.h"
#include "tiles.h"

namespace dapo {
namespace cuda {

// Finite, so that a row that begins with -inf does not meet -inf - -inf.
DAPO_HOST_DEVICE SoftmaxPart first_part() { return {-3.402823466e38f, 0.0f, 0.0f}; }

// The word that begins `phase` bytes before x. By pointer arithmetic: from an integer the compiler could not tell that
// the memory is global, and would load it by generic instructions.
template <class T> DAPO_HOST_DEVICE const Word* words_at(const T* x, int phase) {
  return reinterpret_cast<const Word*>(reinterpret_cast<const char*>(x) - phase);
}

// Elements [e, e + 16 bytes) of a row in global memory; those outside [0, n) are left unset and their memory untouched.
template <class T> DAPO_HOST_DEVICE Word load_elements(const T* row, int n, int e) {
  constexpr int kN = kElements<T>;
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(row + e) % kWord);
  const int aligned = e - phase / static_cast<int>(sizeof(T));
  const Word* words = words_at(row + e, phase);
  if (phase == 0 && e >= 0 && e + kN <= n) return words[0];
  if (phase != 0 && aligned >= 0 && aligned + 2 * kN <= n) return straddle(words[0], words[1], phase);
  float x[kN];
  DAPO_UNROLL
  for (int i = 0; i < kN; ++i) x[i] = e + i >= 0 && e + i < n ? widen(row[e + i]) : 0.0f;
  return pack(x, row);
}

// Where a thread finds the vectors of a slice: in shared memory, behind `phase` bytes of others'.
template <class T> struct SharedSource {
  const Word* words;
  Stretch s;

  DAPO_HOST_DEVICE Word load(int v) const {
    return s.phase == 0 ? words[v] : straddle(words[v], words[v + 1], s.phase);
  }
  DAPO_HOST_DEVICE Word load_at_edge(int v) const { return load(v); }
  DAPO_HOST_DEVICE bool inside(int, int end) const { return end <= s.n / kElements<T>; }
};

// The same in global memory.
template <class T> struct GlobalSource {
  const T* row;
  int n_row;
  Stretch s;

  DAPO_HOST_DEVICE Word load(int v) const {
    const Word* words = words_at(row + s.first, s.phase) + v;
    return s.phase == 0 ? words[0] : straddle(words[0], words[1], s.phase);
  }
  DAPO_HOST_DEVICE Word load_at_edge(int v) const {
    return load_elements(row, n_row, s.first + v * kElements<T>);
  }
  // A straddled vector reaches into its neighbours, which must be the row's own.
  DAPO_HOST_DEVICE bool inside(int begin, int end) const {
    const int margin = s.phase == 0 ? 0 : 1;
    return end <= s.n / kElements<T> && (s.first > 0 || begin >= margin) &&
           s.first + (end + margin) * kElements<T> <= n_row;
  }
};

// Adds thread `thread`'s vectors of tile t. kFull: with the entropy's sum, and a softcap if it is not 0.
template <class T, bool kFull, class Source>
DAPO_HOST_DEVICE void add_tile(SoftmaxPart& part, const Source& source, int t, int thread, float c,
                               const Softcap& softcap) {
  constexpr int kN = kElements<T>;
  const Stretch& s = source.s;
  const bool inside = source.inside(t * kTile, (t + 1) * kTile);
  Word words[kPerThread];
  if (inside) {
    DAPO_UNROLL
    for (int j = 0; j < kPerThread; ++j) words[j] = source.load(tile_index(t, j, thread));
  } else {
    DAPO_UNROLL
    for (int j = 0; j < kPerThread; ++j) {
      const int v = tile_index(t, j, thread), rest = max_of(s.n - v * kN, 0);
      words[j] = rest > 0 ? source.load_at_edge(v) : Word{{0, 0, 0, 0}};
      if (rest < kN) words[j] = pad_word<T>(words[j], rest);
    }
  }
  const Word most = max_of_words<T>(max_of_words<T>(words[0], words[1]), max_of_words<T>(words[2], words[3]));
  float x[kN];
  unpack(most, x, static_cast<const T*>(nullptr));
  float highest = x[0];
  DAPO_UNROLL
  for (int i = 1; i < kN; ++i) highest = fmaxf(highest, x[i]);
  if (kFull) highest = capped(highest, softcap);
  part = lift(part, fmaxf(part.top, highest * c));
  float sum[kPerThread], weighted[kPerThread];
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    sum[j] = weighted[j] = 0.0f;
    unpack(words[j], x, static_cast<const T*>(nullptr));
    if (kFull && softcap.value != 0.0f) {
      DAPO_UNROLL
      for (int i = 0; i < kN; ++i) {  // a logit of -inf becomes -softcap; what is no logit stays -inf
        const bool logit = inside || tile_index(t, j, thread) * kN + i < s.n;
        x[i] = logit ? capped(x[i], softcap) : -INFINITY;
      }
    }
    DAPO_UNROLL
    for (int i = 0; i < kN; ++i) {
      const float d = fmaf(x[i], c, -part.top), e = fast_exp2(d);
      sum[j] += e;
      if (kFull) weighted[j] = fmaf(e, fmaxf(d, -200.0f), weighted[j]);  // at -inf: 0 * -200, not 0 * -inf
    }
  }
  part.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]);
  if (kFull) part.weighted += (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]);
}

template <bool kFull>
DAPO_HOST_DEVICE float gradient_element(float x, const RowGradient& g, const Softcap& softcap) {
  const float y = kFull && softcap.value != 0.0f ? capped(x, softcap) : x;
  const float d = fmaf(y, g.c, -g.top), p = fast_exp2(d);
  const float slope = kFull ? p * fmaf(g.b, fmaxf(d, -200.0f), g.a) : p * g.a;
  return kFull && softcap.value != 0.0f ? slope * cap_slope(y, softcap) : slope;
}

// A word of logits, the first of them the row's element e, turned into their gradient.
template <class T, bool kFull>
DAPO_HOST_DEVICE Word gradient_word(const Word& in, int e, const RowGradient& g, const Softcap& softcap) {
  constexpr int kN = kElements<T>;
  if (g.zero) return Word{{0, 0, 0, 0}};
  float x[kN];
  unpack(in, x, static_cast<const T*>(nullptr));
  DAPO_UNROLL
  for (int i = 0; i < kN; ++i) x[i] = gradient_element<kFull>(x[i], g, softcap);
  const int at = static_cast<int>(g.target) - e;
  if (at >= 0 && at < kN) {
    DAPO_UNROLL
    for (int i = 0; i < kN; ++i) x[i] = i == at ? g.at_target : x[i];
  }
  return pack(x, static_cast<const T*>(nullptr));
}

// A thread's words w = first + j stride of the full words below `end`. All loads stand before the first store.
template <class T, bool kFull, class Load>
DAPO_HOST_DEVICE void write_words(T* out, const Stretch& s, int first, int end, int stride, const RowGradient& g,
                                  const Softcap& softcap, Load load) {
  Word* const to = reinterpret_cast<Word*>(out + s.first + word_element(s, sizeof(T), 0));
  Word words[kPerThread];
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    const int w = first + j * stride;
    if (w >= s.full_begin && w < end) words[j] = load(w);
  }
  DAPO_UNROLL
  for (int j = 0; j < kPerThread; ++j) {
    const int w = first + j * stride;
    if (w >= s.full_begin && w < end) {
      to[w] = gradient_word<T, kFull>(words[j], s.first + word_element(s, sizeof(T), w), g, softcap);
    }
  }
}

// Thread `thread`'s element among those in words that are partly other rows'. load(e): the stretch's element e.
template <class T, bool kFull, class Load>
DAPO_HOST_DEVICE void write_partial(T* out, const Stretch& s, int thread, const RowGradient& g, const Softcap& softcap,
                                    Load load) {
  if (thread >= s.n_partial()) return;
  const int e = s.partial(thread);
  float y = 0.0f;
  if (!g.zero) y = s.first + e == g.target ? g.at_target : gradient_element<kFull>(load(e), g, softcap);
  narrow(y, out + s.first + e);
}

// A stretch of zeros, `n_threads` at work.
template <class T> DAPO_HOST_DEVICE void write_zeros(T* out, const Stretch& s, int thread, int n_threads) {
  Word* const to = reinterpret_cast<Word*>(out + s.first + word_element(s, sizeof(T), 0));
  for (int w = s.full_begin + thread; w < s.full_end; w += n_threads) to[w] = Word{{0, 0, 0, 0}};
  if (thread < s.n_partial()) narrow(0.0f, out + s.first + s.partial(thread));
}

// What gradient_of computed from the capped target, times the cap's slope there.
DAPO_HOST_DEVICE RowGradient through_cap(RowGradient g, float capped_target, const Softcap& softcap) {
  g.at_target *= cap_slope(capped_target, softcap);
  return g;
}

}  // namespace cuda
}  // namespace dapo
