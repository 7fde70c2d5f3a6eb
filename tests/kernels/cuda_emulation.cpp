// The operations of csrc/cuda/kernels.h with the threads of a block, the blocks of a cluster and the bulk copies in
// loops: the kernels' own headers on the host. Built by test_cuda.py in place of the .cu files.
//
// Shared memory is poisoned where the kernel has not written it, and a tile is refilled with the next row's words as soon
// as the kernel would: what is read too late or never fetched shows as NaN.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../../csrc/cuda/row_phases.h"

namespace dapo {
namespace cuda {
namespace {

constexpr int kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kClusters = 2;        // few, so that a cluster has several rows
constexpr int kMultiprocessors = 4;  // rows below this many take the split path
constexpr int kItemSize[3] = {4, 2, 2};

SoftmaxPart merge_lanes(std::vector<SoftmaxPart> parts) {  // butterfly, as by shuffles
  for (size_t lanes = parts.size() / 2; lanes > 0; lanes /= 2) {
    std::vector<SoftmaxPart> merged(parts.size());
    for (size_t i = 0; i < parts.size(); ++i) merged[i] = merge(parts[i], parts[i ^ lanes]);
    parts = merged;
  }
  return parts[0];
}

SoftmaxPart merge_block(const std::vector<SoftmaxPart>& threads) {
  std::vector<SoftmaxPart> warps;
  for (int w = 0; w < kWarps; ++w) {
    warps.push_back(merge_lanes({threads.begin() + w * kWarp, threads.begin() + (w + 1) * kWarp}));
  }
  return merge_lanes(warps);
}

SoftmaxPart merge_slices(const std::vector<SoftmaxPart>& slices) {
  std::vector<SoftmaxPart> lanes(kWarp, empty_part());
  for (size_t k = 0; k < slices.size(); ++k) {
    lanes[k % kWarp] = k < kWarp ? slices[k] : merge(lanes[k % kWarp], slices[k]);
  }
  return merge_lanes(lanes);
}

Slicing slicing_of(const Rows& rows) {
  return slicing(static_cast<int>(rows.n_cols), kItemSize[static_cast<int>(rows.dtype)]);
}

template <class T> T* row_of(const Rows& rows, int64_t row) { return static_cast<T*>(rows.data) + rows.offset(row); }

template <class Run> void for_dtype(const Rows& rows, Run run) {
  if (rows.dtype == Dtype::f32) run(static_cast<float*>(nullptr));
  if (rows.dtype == Dtype::bf16) run(static_cast<bf16*>(nullptr));
  if (rows.dtype == Dtype::f16) run(static_cast<f16*>(nullptr));
}

template <class T, bool kFull, class Source>
SoftmaxPart block_stats(const Source& source, float c, const Softcap& softcap) {
  std::vector<SoftmaxPart> threads(kThreads, first_part());
  for (int t = 0; t < n_tiles(ceil_div(source.s.n, kElements<T>)); ++t) {
    for (int i = 0; i < kThreads; ++i) add_tile<T, kFull>(threads[i], source, t, i, c, softcap);
  }
  return merge_block(threads);
}

template <class T> float target_logit(const Operands& in, int64_t row) {
  return capped(widen(row_of<T>(in.logits, row)[in.tokens.target_ids[row]]), in.softcap);
}

template <class T, bool kFull> SoftmaxPart row_part(const Operands& in, int64_t row) {
  const Slicing cut = slicing_of(in.logits);
  const T* x = row_of<T>(in.logits, row);
  std::vector<SoftmaxPart> parts;
  for (int k = 0; k < cut.n_slices; ++k) {
    const GlobalSource<T> source{x, cut.n_elements, slice_stretch(cut, reinterpret_cast<uintptr_t>(x), k)};
    parts.push_back(block_stats<T, kFull>(source, base2_scale(in.tokens.tau(row)), in.softcap));
  }
  return merge_slices(parts);
}

// slice_grad_kernel, over all slices of a row.
template <class T, bool kFull>
void write_row(const Operands& in, const Rows& grad, int64_t row, const RowGradient& g) {
  const Slicing cut = slicing_of(in.logits);
  const T* x = row_of<T>(in.logits, row);
  T* out = row_of<T>(grad, row);
  const Stretch s = stretch(reinterpret_cast<uintptr_t>(out), sizeof(T), 0, cut.n_elements);
  for (int k = 0; k < cut.n_slices; ++k) {
    const int begin = k * cut.per_slice;
    const int end = k == cut.n_slices - 1 ? s.full_end : std::min(begin + cut.per_slice, s.full_end);
    for (int first = begin; first < end; first += kTile) {
      for (int i = 0; i < kThreads; ++i) {
        write_words<T, kFull>(out, s, first + i, end, kThreads, g, in.softcap, [&](int w) {
          return g.zero ? Word{{0, 0, 0, 0}} : load_elements(x, cut.n_elements, word_element(s, sizeof(T), w));
        });
      }
    }
  }
  for (int i = 0; i < kThreads; ++i) {
    write_partial<T, kFull>(out, s, i, g, in.softcap, [&](int e) { return widen(x[e]); });
  }
}

struct Loss {
  const Operands& in;
  const Objective& objective;
  float entropy_coef;
  const TokenOutputs& out;
  double* losses;

  RowGradient finish(int64_t row, float x_target, const SoftmaxPart& whole) const {
    const float tau = in.tokens.tau(row);
    const RowLoss result = finish_loss(token_values(in.tokens, row), x_target, tau, base2_scale(tau), objective,
                                       entropy_coef, out.entropy != nullptr, whole);
    write_loss(out, row, result);
    losses[row] = result.weighted;
    return through_cap(result.gradient, x_target, in.softcap);
  }
};

// Shared memory of one block of a cluster.
struct Block {
  std::vector<Word> words;
  std::vector<int64_t> row_in_tile;  // whose words a tile holds

  explicit Block(const Slicing& cut) : words(shared_words(cut)), row_in_tile(cut.n_tiles, -1) {
    std::fill(words.begin(), words.end(), Word{{~0u, ~0u, ~0u, ~0u}});
  }
  template <class T> void fetch(const Slicing& cut, const Rows& rows, int64_t row, int rank, int tile) {
    const T* x = row_of<T>(rows, row);
    const Stretch s = slice_stretch(cut, reinterpret_cast<uintptr_t>(x), rank);
    const WordRange copy = tile_copy(s, tile);
    const int end = std::min<int>((tile + 1) * kTile, words.size());
    std::fill(words.begin() + std::min(tile * kTile, end), words.begin() + end, Word{{~0u, ~0u, ~0u, ~0u}});
    if (copy.end > copy.begin) {
      const T* from = x + s.first + word_element(s, sizeof(T), copy.begin);
      if (reinterpret_cast<uintptr_t>(from) % kWord != 0) throw std::logic_error("bulk copy from an unaligned address");
      std::memcpy(&words.at(copy.begin), from, static_cast<size_t>(copy.end - copy.begin) * kWord);
      (void)words.at(copy.end - 1);
    }
    row_in_tile[tile] = row;
  }
  template <class T> T* elements(const Stretch& s) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(words.data()) + s.phase);
  }
};

template <class T, bool kFull> void cluster_loss(const Loss& loss, int cluster) {
  const Operands& in = loss.in;
  const Slicing cut = slicing_of(in.logits);
  if (!cut.fits_cluster()) throw std::invalid_argument("rows do not fit a cluster");
  std::vector<Block> blocks(cut.n_slices, Block(cut));
  const auto live_from = [&](int64_t row) {
    while (row < in.logits.n_rows && !in.tokens.live[row]) row += kClusters;
    return row;
  };
  int64_t live = live_from(cluster);
  for (int k = 0; live < in.logits.n_rows && k < cut.n_slices; ++k) {
    for (int t = 0; t < cut.n_tiles; ++t) blocks[k].fetch<T>(cut, in.logits, live, k, t);
  }
  for (int64_t row = cluster; row < in.logits.n_rows; row += kClusters) {
    T* x = row_of<T>(in.logits, row);
    std::vector<Stretch> slices;
    for (int k = 0; k < cut.n_slices; ++k) slices.push_back(slice_stretch(cut, reinterpret_cast<uintptr_t>(x), k));
    if (row < live) {
      for (const Stretch& s : slices) {
        for (int i = 0; i < kThreads; ++i) write_zeros(x, s, i, kThreads);
      }
      write_dead(loss.out, row);
      loss.losses[row] = 0.0;
      continue;
    }
    std::vector<SoftmaxPart> parts;
    float x_target = NAN;
    for (int k = 0; k < cut.n_slices; ++k) {
      const Stretch& s = slices[k];
      for (int64_t held : blocks[k].row_in_tile) {
        if (held != row) throw std::logic_error("a tile holds another row's words");
      }
      for (int i = 0; i < s.n_partial(); ++i) blocks[k].elements<T>(s)[s.partial(i)] = x[s.first + s.partial(i)];
      const SharedSource<T> source{blocks[k].words.data(), s};
      parts.push_back(block_stats<T, kFull>(source, base2_scale(in.tokens.tau(row)), in.softcap));
      const int at = static_cast<int>(in.tokens.target_ids[row]) - s.first;
      const int owner = static_cast<int>(in.tokens.target_ids[row]) / (cut.per_slice * kElements<T>);
      if ((at >= 0 && at < s.n) != (owner == k)) throw std::logic_error("the target's slice is not its owner");
      if (owner == k) x_target = capped(widen(blocks[k].elements<T>(s)[at]), in.softcap);
    }
    const RowGradient g = loss.finish(row, x_target, merge_slices(parts));
    live = live_from(row + kClusters);
    for (int k = 0; k < cut.n_slices; ++k) {
      const Stretch& s = slices[k];
      for (int i = 0; i < kThreads; ++i) {
        write_partial<T, kFull>(x, s, i, g, in.softcap, [&](int e) { return widen(blocks[k].elements<T>(s)[e]); });
      }
      for (int t = 0; t < cut.n_tiles; ++t) {
        for (int i = 0; i < kThreads; ++i) {
          write_words<T, kFull>(x, s, tile_index(t, 0, i), s.full_end, kThreads, g, in.softcap,
                                [&](int w) { return blocks[k].words.at(w); });
        }
        if (live < in.logits.n_rows) blocks[k].fetch<T>(cut, in.logits, live, k, t);
      }
    }
  }
}

template <class T, bool kFull> void row_by_row(const Loss& loss, bool sweep) {
  for (int64_t row = 0; row < loss.in.logits.n_rows; ++row) {
    RowGradient g = zero_gradient();
    if (loss.in.tokens.live[row]) {
      g = loss.finish(row, target_logit<T>(loss.in, row), row_part<T, kFull>(loss.in, row));
    } else {
      write_dead(loss.out, row);
      loss.losses[row] = 0.0;
    }
    if (!sweep) {
      write_row<T, kFull>(loss.in, loss.in.logits, row, g);
      continue;
    }
    T* x = row_of<T>(loss.in.logits, row);
    const Stretch s = stretch(reinterpret_cast<uintptr_t>(x), sizeof(T), 0, static_cast<int>(loss.in.logits.n_cols));
    const int n_threads = 3 * kThreads, tile = kPerThread * n_threads;
    for (int t = ceil_div(s.n_words, tile) - 1; t >= 0; --t) {
      for (int i = 0; i < n_threads; ++i) {
        write_words<T, kFull>(x, s, t * tile + i, s.full_end, n_threads, g, loss.in.softcap,
                              [&](int w) { return words_at(x, s.phase)[w]; });
      }
    }
    for (int i = 0; i < n_threads; ++i) {
      write_partial<T, kFull>(x, s, i, g, loss.in.softcap, [&](int e) { return widen(x[e]); });
    }
  }
}

}  // namespace

int64_t workspace_bytes(const Rows& logits) { return logits.n_rows; }

Path choose_path(const Rows& logits) {
  if (logits.n_cols > 0 && slicing_of(logits).fits_cluster()) return Path::cluster;
  return logits.n_rows < kMultiprocessors ? Path::split : Path::sweep;
}

void row_stats(const Operands& in, const TokenOutputs& out, void*, uintptr_t) {
  for_dtype(in.logits, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    for (int64_t row = 0; row < in.logits.n_rows; ++row) {
      if (!in.tokens.live[row]) {
        write_dead(out, row);
        continue;
      }
      const bool full = out.entropy != nullptr || in.softcap.value != 0.0f;
      const SoftmaxPart whole = full ? row_part<T, true>(in, row) : row_part<T, false>(in, row);
      write_stats(out, row, target_logit<T>(in, row), base2_scale(in.tokens.tau(row)), whole);
    }
  });
}

void row_grad(const Operands& in, const Rows& grad, const float* norm, const float* entropy, const float* d_logprobs,
              const float* d_entropy, void*, uintptr_t) {
  for_dtype(in.logits, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    for (int64_t row = 0; row < in.logits.n_rows; ++row) {
      RowGradient g = zero_gradient();
      if (in.tokens.live[row]) {
        const float tau = in.tokens.tau(row), x_target = target_logit<T>(in, row);
        g = gradient_of(x_target, in.tokens.target_ids[row], tau, base2_scale(tau), norm[2 * row], norm[2 * row + 1],
                        d_logprobs[row], d_entropy ? d_entropy[row] : 0.0f, d_entropy ? entropy[row] : 0.0f);
        g = through_cap(g, x_target, in.softcap);
      }
      const bool full = d_entropy != nullptr || in.softcap.value != 0.0f;
      full ? write_row<T, true>(in, grad, row, g) : write_row<T, false>(in, grad, row, g);
    }
  });
}

void row_loss(const Operands& in, const Objective& objective, float entropy_coef, const TokenOutputs& out,
              double* losses, void*, Path path, uintptr_t) {
  const Loss loss{in, objective, entropy_coef, out, losses};
  if (path == Path::automatic) path = choose_path(in.logits);
  for_dtype(in.logits, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool full = out.entropy != nullptr || in.softcap.value != 0.0f;
    if (path != Path::cluster) {
      full ? row_by_row<T, true>(loss, path == Path::sweep) : row_by_row<T, false>(loss, path == Path::sweep);
      return;
    }
    for (int cluster = 0; cluster < kClusters; ++cluster) {
      full ? cluster_loss<T, true>(loss, cluster) : cluster_loss<T, false>(loss, cluster);
    }
  });
}

void token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                const TokenOutputs& out, double* losses, uintptr_t) {
  for (int64_t i = 0; i < n; ++i) losses[i] = write_token_loss(i, logprobs, tokens, objective, out);
}

// How often the threads of a cluster fetch, sum and write each element of a row that starts at `address`.
std::vector<std::vector<int>> coverage(int n_cols, int itemsize, uintptr_t address) {
  const Slicing cut = slicing(n_cols, itemsize);
  const int per_word = kWord / itemsize;
  std::vector<int> fetched(n_cols), summed(n_cols), written(n_cols);
  for (int k = 0; k < cut.n_slices; ++k) {
    const Stretch s = slice_stretch(cut, address, k);
    for (int t = 0; t < cut.n_tiles; ++t) {
      const WordRange copy = tile_copy(s, t);
      for (int w = copy.begin; w < copy.end; ++w) {
        for (int i = 0; i < per_word; ++i) ++fetched.at(s.first + word_element(s, itemsize, w) + i);
      }
      for (int thread = 0; thread < kThreads; ++thread) {
        for (int j = 0; j < kPerThread; ++j) {
          const int index = tile_index(t, j, thread);
          for (int i = 0; i < per_word; ++i) {
            if (index * per_word + i < s.n) ++summed.at(s.first + index * per_word + i);
            if (s.whole(index)) ++written.at(s.first + word_element(s, itemsize, index) + i);
          }
        }
      }
    }
    for (int i = 0; i < s.n_partial(); ++i) {
      ++fetched.at(s.first + s.partial(i));
      ++written.at(s.first + s.partial(i));
    }
  }
  return {fetched, summed, written};
}

}  // namespace cuda
}  // namespace dapo

PYBIND11_MODULE(cuda_coverage, m) {
  m.def("coverage", &dapo::cuda::coverage);
  m.def("slices", [](int n_cols, int itemsize) {
    const dapo::cuda::Slicing s = dapo::cuda::slicing(n_cols, itemsize);
    return std::make_tuple(s.n_slices, s.per_slice, s.fits_cluster());
  });
}
