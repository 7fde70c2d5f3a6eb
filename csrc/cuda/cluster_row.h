// What a thread of a cluster does with row after row: the body of cluster_loss.cu's kernel.
//
// `Machine` is what a thread asks of the hardware: who it is, barriers, bulk copies, the shared memory of its cluster's
// other blocks. cluster_loss.cu has Hopper's; a test has one on the host, where threads take turns and copies are late.
#pragma once

#include "rows.h"

#if defined(__CUDACC__)
#define DAPO_DEVICE __device__ inline
#else
#define DAPO_DEVICE inline
#endif

namespace dapo {
namespace cuda {

// What a block sends to all of its cluster: 16 bytes.
struct alignas(16) SlicePart {
  SoftmaxPart part;
  float x_target;  // of the slice that holds the target
};

// A live row of the cluster and this block's slice of it. In shared memory: registers are what this kernel is short of.
template <class T> struct RowPlan {
  T* x;
  int row;  // n_rows when there is none left
  Stretch slice;
};

// A block's shared memory beside its slice of the logits. Variables of their own rather than one struct, with which ptxas
// needs more registers and spills.
template <class T> struct ClusterShared {
  uint64_t (&arrived)[kMaxTiles];  // barriers of the tiles
  uint64_t (&met)[2];              // and of the slices' parts
  SoftmaxPart (&warp_parts)[kWarps];
  SlicePart (&slice_parts)[2][kMaxCluster];  // of this row and, by a block that is ahead, of the next
  RowPlan<T> (&plans)[2];                    // of this row and the next
  TokenValues& token;
  RowGradient& gradient;
  float& scale;
};

template <class T> DAPO_DEVICE RowPlan<T> plan_row(const LossArgs& args, int row, int step, int rank) {
  const int n_rows = static_cast<int>(args.in.logits.n_rows);
  while (row < n_rows && !args.in.tokens.live[row]) row += step;
  if (row >= n_rows) return {nullptr, n_rows, {}};
  T* const x = row_of<T>(args.in.logits, row);
  return {x, row, slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), rank)};
}

// One thread. Every tile's barrier turns over once per live row, with or without bytes.
template <class Machine, class T>
DAPO_DEVICE void fetch(const RowPlan<T>& plan, int tile, Word* words, uint64_t* arrived) {
  const WordRange copy = tile_copy(plan.slice, tile);
  const int bytes = (copy.end - copy.begin) * kWord;
  Machine::arrive_expecting(&arrived[tile], bytes);
  if (bytes == 0) return;
  const T* from = plan.x + plan.slice.first + word_element(plan.slice, sizeof(T), copy.begin);
  Machine::bulk_load(words + copy.begin, from, bytes, &arrived[tile]);
}

template <class T> DAPO_DEVICE T* elements_of(const RowPlan<T>& plan, Word* words) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(words) + plan.slice.phase);
}

// Words that are partly other rows' come by hand.
template <class Machine, class T> DAPO_DEVICE void stage_edges(const RowPlan<T>& plan, Word* words) {
  const Stretch& s = plan.slice;
  if (s.n_partial() == 0) return;
  if (Machine::thread() < s.n_partial()) {
    const int e = s.partial(Machine::thread());
    elements_of(plan, words)[e] = plan.x[s.first + e];
    // The next row may start elsewhere within its first word: then a copy overwrites what was just written.
    Machine::order_before_copies();
  }
  Machine::block_sync();
}

template <class Machine, class T, bool kFull>
DAPO_DEVICE SoftmaxPart slice_stats(const Stretch& s, const Word* words, uint64_t* arrived, int parity, float c,
                                    const Softcap& softcap) {
  const SharedSource<T> source{words, s};
  const int vector_tiles = n_tiles(ceil_div(s.n, kElements<T>)), word_tiles = n_tiles(s.n_words);
  SoftmaxPart part = first_part();
  for (int t = 0, waited = 0; t < vector_tiles; ++t) {
    // The last vector of a tile may straddle into the next.
    for (; waited < min_of(t + 1 + (s.phase != 0), word_tiles); ++waited) Machine::wait(&arrived[waited], parity);
    add_tile<T, kFull>(part, source, t, Machine::thread(), c, softcap);
  }
  return part;
}

template <class Machine, class T, bool kFull>
DAPO_DEVICE void cluster_loss(const LossArgs& args, Word* words, const ClusterShared<T>& shared) {
  uint64_t* const arrived = shared.arrived;
  const int n_slices = args.slicing.n_slices, tiles = args.slicing.n_tiles;
  const int thread = Machine::thread(), lane = thread % kWarp, warp = thread / kWarp;
  const int n_rows = static_cast<int>(args.in.logits.n_rows);  // launch.cpp: fewer than 2^31
  int row = Machine::cluster();
  if (thread == 0) {
    for (int t = 0; t < tiles; ++t) Machine::init_barrier(&arrived[t]);
    for (uint64_t& barrier : shared.met) Machine::init_barrier(&barrier);
    Machine::publish_barriers();
    shared.plans[0] = plan_row<T>(args, row, Machine::clusters(), Machine::rank());
    for (int t = 0; t < tiles && shared.plans[0].row < n_rows; ++t) fetch<Machine>(shared.plans[0], t, words, arrived);
  }
  Machine::cluster_sync();
  for (int use = 0;; ++use) {
    const RowPlan<T>& plan = shared.plans[use & 1];
    for (; row < plan.row; row += Machine::clusters()) {  // dead
      T* const x = row_of<T>(args.in.logits, row);
      const Stretch s = slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), Machine::rank());
      write_zeros(x, s, thread, kThreads);
      if (Machine::rank() == 0 && thread == 0) write_dead_loss(args, row);
    }
    if (row >= n_rows) break;
    if (thread == kThreads - 1) {  // what thread 0 will need, while the others begin
      shared.token = token_values(args.in.tokens, row);
      shared.plans[(use + 1) & 1] = plan_row<T>(args, row + Machine::clusters(), Machine::clusters(), Machine::rank());
    }
    const float c = base2_scale_of(args, row);
    if (thread == kThreads - 1) shared.scale = c;
    stage_edges<Machine>(plan, words);
    const SoftmaxPart part = Machine::merge_warp(
        slice_stats<Machine, T, kFull>(plan.slice, words, arrived, use & 1, c, args.in.softcap));
    if (lane == 0) shared.warp_parts[warp] = part;
    Machine::block_sync();
    if (warp == 0) {
      SlicePart* const parts = shared.slice_parts[use & 1];
      uint64_t* const met = &shared.met[use & 1];
      SlicePart mine{Machine::merge_warps(shared.warp_parts, lane), 0.0f};
      const int at = static_cast<int>(shared.token.target) - plan.slice.first;
      if (at >= 0 && at < plan.slice.n) mine.x_target = widen(elements_of(plan, words)[at]);
      // Messages that are counted, not stores and a barrier of the cluster: that would wait until the whole GPU sees
      // every gradient stored so far. Nobody is two rows ahead, since nobody gets there without everyone's next part.
      if (lane == 0) Machine::arrive_expecting(met, n_slices * static_cast<int>(sizeof(SlicePart)));
      if (lane < n_slices) Machine::send(&parts[Machine::rank()], lane, mine, met);
      Machine::wait_for_cluster(met, use >> 1 & 1);
      const SoftmaxPart whole = Machine::merge_warp(lane < n_slices ? parts[lane].part : empty_part());
      if (lane == 0) {
        const int owner = static_cast<int>(shared.token.target) / (args.slicing.per_slice * kElements<T>);
        const float x_target = capped(parts[owner].x_target, args.in.softcap);
        const RowLoss result = finish_loss(shared.token, x_target, args.in.tokens.tau(plan.row), shared.scale,
                                           args.objective, args.entropy_coef, args.out.entropy != nullptr, whole);
        shared.gradient = through_cap(result.gradient, x_target, args.in.softcap);
        if (Machine::rank() == 0) {
          write_loss(args.out, plan.row, result);
          args.losses[plan.row] = result.weighted;
        }
      }
    }
    Machine::block_sync();
    const RowPlan<T>& next = shared.plans[(use + 1) & 1];
    const Stretch s = plan.slice;
    row = plan.row + Machine::clusters();
    const RowGradient g = shared.gradient;
    write_partial<T, kFull>(plan.x, s, thread, g, args.in.softcap,
                            [&](int e) { return widen(elements_of(plan, words)[e]); });
    for (int t = 0; t < tiles; ++t) {
      write_words<T, kFull>(plan.x, s, tile_index(t, 0, thread), s.full_end, kThreads, g, args.in.softcap,
                            [&](int w) { return words[w]; });
      Machine::block_sync();  // tile t of shared memory has been read for the last time
      if (thread == 0 && next.row < n_rows) fetch<Machine>(next, t, words, arrived);
    }
  }
}

}  // namespace cuda
}  // namespace dapo
