// Index arithmetic of the CUDA kernels, for the device and for the host: which elements of a row belong to whom.
//
//   vector   16 bytes of consecutive elements counted from the row's beginning: the unit of summation
//   word     a full vector of a row that starts on 16 bytes: what one access or a copy moves. Other vectors are read and
//            written one element at a time
//   slice    the vectors of a row that one thread block of kThreads reduces; a cluster holds one row, a block one slice
//   tile     kThreads * kPerThread consecutive vectors of a slice: 16 KiB
//
// A row's sum is taken in an order that depends on its length and dtype alone: vectors to threads, threads to a slice,
// slices to the row. So its bits depend neither on the kernel that computes it nor on where the row stands in memory.
#pragma once

#include <cstdint>

#include "../params.h"

namespace dapo::cuda {

constexpr int kWord = 16;
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 4;  // vectors of a tile in one thread: 4 independent 16-byte loads in flight
constexpr int kTile = kThreads * kPerThread;

// Four slices of 40 KiB and their blocks (64 registers * 256 threads) fit one SM of Hopper and Blackwell: while one
// cluster waits for its row's statistics, others keep the memory busy.
constexpr int kSliceVectors = 40 * 1024 / kWord;
// Clusters of more than 8 blocks need the non-portable attribute; 16 is the most there is.
constexpr int kMaxCluster = 16;
// What a block of a cluster holds at most: 227 KiB less what the kernel keeps beside the logits.
constexpr int kMaxSharedWords = 222 * 1024 / kWord;
constexpr int kMaxTiles = (kMaxSharedWords + kTile - 1) / kTile;
constexpr int kMaxSlices = 256;
// Elements of a row: indices within a row are int, with room for the tile that overhangs.
constexpr int kMaxColumns = 1 << 30;

template <class I> DAPO_HOST_DEVICE I min_of(I a, I b) { return b < a ? b : a; }
template <class I> DAPO_HOST_DEVICE I max_of(I a, I b) { return a < b ? b : a; }
template <class I> DAPO_HOST_DEVICE I ceil_div(I a, I b) { return (a + b - 1) / b; }

// How rows of n elements are cut into slices.
struct Slicing {
  int n_elements, itemsize;
  int n_vectors;  // the last may be part full
  int per_slice;  // vectors; a multiple of 8, so that slices of aligned rows start on 128 bytes
  int n_slices;   // more than kMaxCluster: no cluster holds such a row

  DAPO_HOST_DEVICE int vector_elements() const { return kWord / itemsize; }
};

DAPO_HOST_DEVICE Slicing slicing(int n_elements, int itemsize) {
  Slicing s{n_elements, itemsize, 0, 0, 1};
  s.n_vectors = ceil_div(n_elements, s.vector_elements());
  while (s.n_slices < kMaxCluster && s.n_vectors > s.n_slices * kSliceVectors) s.n_slices *= 2;
  if (s.n_vectors > kMaxCluster * (kMaxSharedWords - 8)) {
    s.n_slices = min_of(kMaxSlices, ceil_div(s.n_vectors, kSliceVectors));
  }
  s.per_slice = ceil_div(ceil_div(s.n_vectors, s.n_slices), 8) * 8;
  return s;
}

// Elements [first, first + n) of a row, the first n_words vectors of which are words.
struct Slice {
  int first, n, n_words;
};

// Slice k of a row; of two rows, with words where both have them.
DAPO_HOST_DEVICE Slice slice_of(const Slicing& s, int k, const void* row, const void* other = nullptr) {
  const bool aligned = (reinterpret_cast<uintptr_t>(row) | reinterpret_cast<uintptr_t>(other)) % kWord == 0;
  const int per = s.per_slice * s.vector_elements(), first = min_of(k * per, s.n_elements);
  const int n = min_of(per, s.n_elements - first);
  return {first, n, aligned ? n / s.vector_elements() : 0};
}

DAPO_HOST_DEVICE Slice whole_row(const Slicing& s, const void* row) {
  return slice_of({s.n_elements, s.itemsize, s.n_vectors, s.n_vectors, 1}, 0, row);
}

DAPO_HOST_DEVICE int n_tiles(int vectors) { return ceil_div(vectors, kTile); }

// Thread `thread`'s j-th vector of tile t.
DAPO_HOST_DEVICE int tile_index(int t, int j, int thread) { return t * kTile + j * kThreads + thread; }

// Words of shared memory that a block of a cluster needs for its slice.
DAPO_HOST_DEVICE int shared_words(const Slicing& s) { return min_of(s.per_slice, s.n_vectors); }

}  // namespace dapo::cuda
