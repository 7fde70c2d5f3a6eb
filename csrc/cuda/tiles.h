// Index arithmetic of the CUDA kernels, for the device and for the host: which bytes of a row belong to whom.
//
//   vector   16 bytes of consecutive elements counted from the row's beginning: the unit of summation
//   word     16 aligned bytes of memory: the unit of copies. A vector is a word when the row starts on 16 bytes; else it
//            straddles two, and the row's first and last words are partly other rows'
//   slice    the vectors of a row that one thread block of kThreads reduces; a cluster holds one row, a block one slice
//   tile     kThreads * kPerThread consecutive vectors (or words) of a slice: 16 KiB
//
// A row's sum is taken in an order that depends on its length and dtype alone: vectors to threads, threads to a slice,
// slices to the row. So its bits depend neither on the kernel that computes it nor on where the row stands in memory.
#pragma once

#include <cstdint>

#include "../params.h"

namespace dapo {
namespace cuda {

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
  int n_slices;
  int n_tiles;  // of the words that a slice may touch

  DAPO_HOST_DEVICE int vector_elements() const { return kWord / itemsize; }
  DAPO_HOST_DEVICE bool fits_cluster() const { return n_slices <= kMaxCluster && per_slice + 1 <= kMaxSharedWords; }
};

DAPO_HOST_DEVICE Slicing slicing(int n_elements, int itemsize) {
  Slicing s{n_elements, itemsize, 0, 0, 1, 0};
  s.n_vectors = ceil_div(n_elements, s.vector_elements());
  while (s.n_slices < kMaxCluster && s.n_vectors > s.n_slices * kSliceVectors) s.n_slices *= 2;
  if (s.n_vectors > kMaxCluster * (kMaxSharedWords - 8)) {  // no cluster holds such a row: many slices
    s.n_slices = min_of(kMaxSlices, ceil_div(s.n_vectors, kSliceVectors));
  }
  s.per_slice = ceil_div(ceil_div(s.n_vectors, s.n_slices), 8) * 8;
  s.n_tiles = ceil_div(s.per_slice + 1, kTile);
  return s;
}

// A stretch of elements of one row in memory: where its words lie. Elements are counted from the stretch's first.
struct Stretch {
  int first;    // of the row's elements
  int n;        // elements, >= 0
  int phase;    // bytes from the aligned address at or below the first element up to it
  int n_words;  // touched, partly or wholly
  int full_begin, full_end;  // words that hold nothing but elements of the stretch
  int head, tail;            // elements in the partial words before and after those

  DAPO_HOST_DEVICE bool whole(int word) const { return word >= full_begin && word < full_end; }
  DAPO_HOST_DEVICE int n_partial() const { return head + tail; }
  // The i-th element that lies in no full word.
  DAPO_HOST_DEVICE int partial(int i) const { return i < head ? i : n - tail + (i - head); }
};

DAPO_HOST_DEVICE Stretch stretch(uintptr_t row_address, int itemsize, int first, int last) {
  Stretch s{first, max_of(last - first, 0), 0, 0, 0, 0, 0, 0};
  s.phase = static_cast<int>((row_address + static_cast<uintptr_t>(first) * itemsize) % kWord);
  const int64_t end = s.phase + static_cast<int64_t>(s.n) * itemsize;
  s.n_words = s.n == 0 ? 0 : static_cast<int>((end + kWord - 1) / kWord);
  s.full_begin = s.phase == 0 ? 0 : 1;
  s.full_end = static_cast<int>(end / kWord);
  s.head = s.full_begin == 0 ? 0 : min_of((kWord - s.phase) / itemsize, s.n);
  s.tail = s.full_end < s.full_begin ? 0 : s.n - s.head - (s.full_end - s.full_begin) * (kWord / itemsize);
  s.full_end = max_of(s.full_end, s.full_begin);
  return s;
}

// The vectors of slice k of a row, as a stretch.
DAPO_HOST_DEVICE Stretch slice_stretch(const Slicing& s, uintptr_t row_address, int k) {
  const int64_t per = static_cast<int64_t>(s.per_slice) * s.vector_elements();
  return stretch(row_address, s.itemsize, static_cast<int>(min_of<int64_t>(k * per, s.n_elements)),
                 static_cast<int>(min_of<int64_t>((k + 1) * per, s.n_elements)));
}

// The part of a stretch's full words that lies in tile t: what one bulk copy moves.
struct WordRange {
  int begin, end;
};

DAPO_HOST_DEVICE WordRange tile_copy(const Stretch& s, int t) {
  const int begin = max_of(t * kTile, s.full_begin), end = min_of((t + 1) * kTile, s.full_end);
  return {begin, max_of(begin, end)};
}

DAPO_HOST_DEVICE int n_tiles(int units) { return ceil_div(units, kTile); }

// Thread `thread`'s j-th vector (or word) of tile t.
DAPO_HOST_DEVICE int tile_index(int t, int j, int thread) { return t * kTile + j * kThreads + thread; }

// The stretch's element that starts word w; negative in a partial first word.
DAPO_HOST_DEVICE int word_element(const Stretch& s, int itemsize, int w) {
  return w * (kWord / itemsize) - s.phase / itemsize;
}

// Words of shared memory that a block needs for its slice: one more than its vectors when rows are not aligned, and one
// that a straddling read of the last vector may touch.
DAPO_HOST_DEVICE int shared_words(const Slicing& s) { return min_of(s.per_slice, s.n_vectors) + 2; }

}  // namespace cuda
}  // namespace dapo
