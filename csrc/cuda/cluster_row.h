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

namespace dapo::cuda {

// What a block sends to all of its cluster: 16 bytes.
struct alignas(16) SlicePart {
  SoftmaxPart part;
};

// A block's shared memory beside its slice of the logits.
struct ClusterShared {
  uint64_t arrived[kMaxTiles], met[2];  // barriers of the tiles, and of the slices' parts
  SoftmaxPart warp_parts[kWarps];
  SlicePart slice_parts[2][kMaxCluster];  // of this row and, by a block that is ahead, of the next
  int rows[2];                            // this row and the next; n_rows when there is none left
  TokenValues token;
  RowGradient gradient;
  float scale, x_target;
};

DAPO_DEVICE int live_row(const LossArgs& args, int row, int step) {
  const int n_rows = static_cast<int>(args.in.logits.n_rows);
  while (row < n_rows && !args.in.tokens.live[row]) row += step;
  return min_of(row, n_rows);
}

// One thread. Every tile's barrier turns over once per live row, with or without bytes.
template <class Machine, class T>
DAPO_DEVICE void fetch(const T* x, const Slice& slice, int tile, Word* words, uint64_t* arrived) {
  const int first = tile * kTile, bytes = max_of(min_of(kTile, slice.n_words - first), 0) * kWord;
  Machine::arrive_expecting(&arrived[tile], bytes);
  if (bytes > 0) Machine::bulk_load(words + first, words_of(x) + first, bytes, &arrived[tile]);
}

// Rows start on 16 bytes. Shared memory holds a slice's words; the elements after them are read where they are.
template <class Machine, class T, bool kFull>
DAPO_DEVICE void cluster_loss(const LossArgs& args, Word* words, ClusterShared& shared) {
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
    shared.rows[0] = live_row(args, row, Machine::clusters());
    for (int t = 0; t < tiles && shared.rows[0] < n_rows; ++t) {
      fetch<Machine>(row_of<T>(args.in.logits, shared.rows[0]) + slice.first, slice, t, words, arrived);
    }
  }
  Machine::cluster_sync();
  for (int use = 0;; ++use) {
    const int live = shared.rows[use & 1];
    for (; row < live; row += Machine::clusters()) {  // dead
      T* const x = row_of<T>(args.in.logits, row) + slice.first;
      write_gradient<T, kFull>(x, x, slice, thread, kThreads, zero_gradient(), softcap);
      if (Machine::rank() == 0 && thread == 0) finish_dead_row(args, row);
    }
    if (row >= n_rows) break;
    const float c = base2_scale_of(args, row);
    if (thread == kThreads - 1) {  // what thread 0 will need, while the others begin
      shared.token = token_values(args.in.tokens, row);
      shared.x_target = target_logit(args.in, row);
      shared.scale = c;
      shared.rows[(use + 1) & 1] = live_row(args, row + Machine::clusters(), Machine::clusters());
    }
    T* const x = row_of<T>(args.in.logits, row) + slice.first;
    SoftmaxPart part = empty_part();
    for (int t = 0; t < n_tiles(ceil_div(slice.n, kElements<T>)); ++t) {
      Machine::wait(&arrived[t], use & 1);
      add_tile<T, kFull>(part, words, x, slice, t, thread, c, softcap);
    }
    part = Machine::template merge<kWarp>(part, c);
    if (lane == 0) shared.warp_parts[warp] = part;
    Machine::block_sync();
    if (warp == 0) {
      SlicePart* const parts = shared.slice_parts[use & 1];
      uint64_t* const met = &shared.met[use & 1];
      const SlicePart mine{Machine::template merge<kWarps>(shared.warp_parts[lane % kWarps], c)};
      // Messages that are counted, not stores and a barrier of the cluster: that would wait until the whole GPU sees
      // every gradient stored so far. Nobody is two rows ahead, since nobody gets there without everyone's next part;
      // nobody writes gradients over a logit that another still reads, the target's.
      if (lane == 0) Machine::arrive_expecting(met, n_slices * static_cast<int>(sizeof(SlicePart)));
      if (lane < n_slices) Machine::send(&parts[Machine::rank()], lane, mine, met);
      Machine::wait_for_cluster(met, use >> 1 & 1);
      const SoftmaxPart whole = Machine::template merge<kMaxCluster>(lane < n_slices ? parts[lane].part : empty_part(), c);
      if (lane == 0) {
        shared.gradient = finish_row<kFull>(args, row, shared.token, shared.x_target, shared.scale, whole,
                                            Machine::rank() == 0);
      }
    }
    Machine::block_sync();
    const int next = shared.rows[(use + 1) & 1];
    const RowGradient g = shared.gradient;
    write_rest<T, kFull>(x, x, slice, thread, kThreads, g, softcap);
    for (int t = 0; t < tiles; ++t) {
      write_words<T, kFull, true>(x, words, slice, tile_index(t, 0, thread), kThreads, g, softcap);
      Machine::block_sync();  // tile t of shared memory has been read for the last time
      if (thread == 0 && next < n_rows) {
        fetch<Machine>(row_of<T>(args.in.logits, next) + slice.first, slice, t, words, arrived);
      }
    }
    row += Machine::clusters();
  }
}

}  // namespace dapo::cuda
