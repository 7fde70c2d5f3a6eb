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
};

// A live row of the cluster and this block's slice of it. In shared memory: registers are what this kernel is short of.
struct RowPlan {
  void* x;
  int row;  // n_rows when there is none left
};

// A block's shared memory beside its slice of the logits. Variables of their own rather than one struct, with which ptxas
// needs more registers and spills.
struct ClusterShared {
  uint64_t (&arrived)[kMaxTiles];  // barriers of the tiles
  uint64_t (&met)[2];              // and of the slices' parts
  SoftmaxPart (&warp_parts)[kWarps];
  SlicePart (&slice_parts)[2][kMaxCluster];  // of this row and, by a block that is ahead, of the next
  RowPlan (&plans)[2];                       // of this row and the next
  TokenValues& token;
  RowGradient& gradient;
  float &scale, &x_target;
};

template <class T> DAPO_DEVICE RowPlan plan_row(const LossArgs& args, int row, int step, int first) {
  const int n_rows = static_cast<int>(args.in.logits.n_rows);
  while (row < n_rows && !args.in.tokens.live[row]) row += step;
  if (row >= n_rows) return {nullptr, n_rows};
  return {row_of<T>(args.in.logits, row) + first, row};
}

// One thread. Every tile's barrier turns over once per live row, with or without bytes.
template <class Machine>
DAPO_DEVICE void fetch(const RowPlan& plan, const Slice& slice, int tile, Word* words, uint64_t* arrived) {
  const int first = tile * kTile, bytes = max_of(min_of(kTile, slice.n_words - first), 0) * kWord;
  Machine::arrive_expecting(&arrived[tile], bytes);
  if (bytes > 0) Machine::bulk_load(words + first, static_cast<Word*>(plan.x) + first, bytes, &arrived[tile]);
}

// Rows start on 16 bytes. A slice is in shared memory but for the elements after its last word: those stay where they are.
template <class Machine, class T, bool kFull>
DAPO_DEVICE void cluster_loss(const LossArgs& args, Word* words, const ClusterShared& shared) {
  uint64_t* const arrived = shared.arrived;
  const Softcap& softcap = args.in.softcap;
  const int n_slices = args.slicing.n_slices, tiles = n_tiles(args.slicing.per_slice);
  const int thread = Machine::thread(), lane = thread % kWarp, warp = thread / kWarp;
  const int n_rows = static_cast<int>(args.in.logits.n_rows);  // launch.cpp: fewer than 2^31
  const Slice slice = slice_of(args.slicing, Machine::rank(), nullptr);
  int row = Machine::cluster();
  if (thread == 0) {
    for (int t = 0; t < tiles; ++t) Machine::init_barrier(&arrived[t]);
    for (uint64_t& barrier : shared.met) Machine::init_barrier(&barrier);
    Machine::publish_barriers();
    shared.plans[0] = plan_row<T>(args, row, Machine::clusters(), slice.first);
    for (int t = 0; t < tiles && shared.plans[0].row < n_rows; ++t) {
      fetch<Machine>(shared.plans[0], slice, t, words, arrived);
    }
  }
  Machine::cluster_sync();
  for (int use = 0;; ++use) {
    const RowPlan& plan = shared.plans[use & 1];
    for (; row < plan.row; row += Machine::clusters()) {  // dead
      T* const x = row_of<T>(args.in.logits, row) + slice.first;
      write_gradient<T, kFull>(x, x, slice, thread, kThreads, zero_gradient(), softcap);
      if (Machine::rank() == 0 && thread == 0) write_dead_loss(args, row);
    }
    if (row >= n_rows) break;
    const float c = base2_scale_of(args, row);
    if (thread == kThreads - 1) {  // what thread 0 will need, while the others begin
      shared.token = token_values(args.in.tokens, row);
      shared.x_target = target_logit(args.in, row);
      shared.scale = c;
      shared.plans[(use + 1) & 1] = plan_row<T>(args, row + Machine::clusters(), Machine::clusters(), slice.first);
    }
    T* const x = static_cast<T*>(plan.x);
    SoftmaxPart part = first_part();
    for (int t = 0; t < n_tiles(ceil_div(slice.n, kElements<T>)); ++t) {
      Machine::wait(&arrived[t], use & 1);
      add_tile<T, kFull>(part, words, x, slice, t, thread, c, softcap);
    }
    part = Machine::merge_warp(part);
    if (lane == 0) shared.warp_parts[warp] = part;
    Machine::block_sync();
    if (warp == 0) {
      SlicePart* const parts = shared.slice_parts[use & 1];
      uint64_t* const met = &shared.met[use & 1];
      const SlicePart mine{Machine::merge_warps(shared.warp_parts, lane)};
      // Messages that are counted, not stores and a barrier of the cluster: that would wait until the whole GPU sees
      // every gradient stored so far. Nobody is two rows ahead, since nobody gets there without everyone's next part;
      // nobody writes gradients over a logit that another still reads, the target's.
      if (lane == 0) Machine::arrive_expecting(met, n_slices * static_cast<int>(sizeof(SlicePart)));
      if (lane < n_slices) Machine::send(&parts[Machine::rank()], lane, mine, met);
      Machine::wait_for_cluster(met, use >> 1 & 1);
      const SoftmaxPart whole = Machine::merge_warp(lane < n_slices ? parts[lane].part : empty_part());
      if (lane == 0) {
        const RowLoss result = finish_loss(shared.token, shared.x_target, args.in.tokens.tau(plan.row), shared.scale,
                                           args.objective, args.entropy_coef, kFull && args.out.entropy != nullptr,
                                           whole);
        shared.gradient = through_cap(result.gradient, shared.x_target, softcap);
        if (Machine::rank() == 0) {
          write_loss(args.out, plan.row, result);
          args.losses[plan.row] = result.weighted;
        }
      }
    }
    Machine::block_sync();
    const RowPlan& next = shared.plans[(use + 1) & 1];
    const RowGradient g = shared.gradient;
    row = plan.row + Machine::clusters();
    write_rest<T, kFull>(x, x, slice, thread, kThreads, g, softcap);
    for (int t = 0; t < tiles; ++t) {
      write_words<T, kFull>(x, words, slice, tile_index(t, 0, thread), kThreads, g, softcap);
      Machine::block_sync();  // tile t of shared memory has been read for the last time
      if (thread == 0 && next.row < n_rows) fetch<Machine>(next, slice, t, words, arrived);
    }
  }
}

}  // namespace cuda
}  // namespace dapo
