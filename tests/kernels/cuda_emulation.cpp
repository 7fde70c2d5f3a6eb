// The launchers of csrc/cuda/launch.h on the host: the kernels' own headers, under launch.cpp as it is. Built by
// test_cuda.py in place of the .cu files.
//
// The cluster kernel runs whole, its threads taking turns (cuda_threads.h); of the others, threads and blocks are loops
// around the same phases.
#include <stdexcept>
#include <tuple>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda_threads.h"

namespace dapo {
namespace cuda {
namespace {

constexpr int kClusters = 2;  // few, so that a cluster has several rows
unsigned turns = 0;           // the next cluster's order of threads; set by tests

SoftmaxPart merge_slices(const SoftmaxPart* slices, int n) {
  std::vector<SoftmaxPart> lanes(kWarp, empty_part());
  for (int k = 0; k < n; ++k) lanes[k % kWarp] = k < kWarp ? slices[k] : merge(lanes[k % kWarp], slices[k]);
  return merge_tree(lanes);
}

template <class T, bool kFull> SoftmaxPart slice_part(const RowArgs& args, int64_t row, int k) {
  const T* x = row_of<T>(args.in.logits, row);
  const Stretch s = slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), k);
  const GlobalSource<T> source{x, args.slicing.n_elements, s};
  const float c = base2_scale_of(args, row);
  std::vector<SoftmaxPart> threads(kThreads, first_part()), warps;
  for (int t = 0; t < n_tiles(ceil_div(s.n, kElements<T>)); ++t) {
    for (int i = 0; i < kThreads; ++i) add_tile<T, kFull>(threads[i], source, t, i, c, args.in.softcap);
  }
  for (int w = 0; w < kWarps; ++w) {
    warps.push_back(merge_tree({threads.begin() + w * kWarp, threads.begin() + (w + 1) * kWarp}));
  }
  return merge_tree(warps);
}

// sweep_loss_kernel's second sweep.
template <class T, bool kFull> void sweep_gradient(const LossArgs& args, T* x, const RowGradient& g) {
  const Stretch s = stretch(reinterpret_cast<uintptr_t>(x), sizeof(T), 0, args.slicing.n_elements);
  const int n_threads = 3 * kThreads, tile = kPerThread * n_threads;
  for (int t = ceil_div(s.n_words, tile) - 1; t >= 0; --t) {
    for (int i = 0; i < n_threads; ++i) {
      write_words<T, kFull>(x, s, t * tile + i, s.full_end, n_threads, g, args.in.softcap,
                            [&](int w) { return words_at(x, s.phase)[w]; });
    }
  }
  for (int i = 0; i < n_threads; ++i) {
    write_partial<T, kFull>(x, s, i, g, args.in.softcap, [&](int e) { return widen(x[e]); });
  }
}

}  // namespace

bool cluster_code_loaded() { return pretended.cluster_code; }

void launch_cluster_loss(const LossArgs& args, cudaStream_t) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    for (int k = 0; k < kClusters; ++k) {
      HostCluster cluster(args.slicing.n_slices, shared_words(args.slicing), k, kClusters, turns++);
      cluster.run([&](int rank) {
        cluster_loss<HostCluster::Machine, T, decltype(full)::value>(args, cluster.words(rank),
                                                                     cluster.shared<T>(rank));
      });
    }
  });
}

void launch_sweep_loss(const LossArgs& args, cudaStream_t) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr bool kFull = decltype(full)::value;
    for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
      T* x = row_of<T>(args.in.logits, row);
      if (args.in.tokens.live[row]) {
        std::vector<SoftmaxPart> parts;
        for (int k = 0; k < args.slicing.n_slices; ++k) parts.push_back(slice_part<T, kFull>(args, row, k));
        const SoftmaxPart whole = merge_slices(parts.data(), args.slicing.n_slices);
        sweep_gradient<T, kFull>(args, x, finish_row(args, row, whole));
      } else {
        const Stretch s = stretch(reinterpret_cast<uintptr_t>(x), sizeof(T), 0, args.slicing.n_elements);
        for (int i = 0; i < kThreads; ++i) write_zeros(x, s, i, kThreads);
        write_dead_loss(args, row);
      }
    }
  });
}

void launch_slice_stats(const RowArgs& args, SoftmaxPart* parts, cudaStream_t) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int n = args.slicing.n_slices;
    for (int64_t i = 0; i < args.in.logits.n_rows * n; ++i) {
      if (args.in.tokens.live[i / n]) {
        parts[i] = slice_part<T, decltype(full)::value>(args, i / n, static_cast<int>(i % n));
      }
    }
  });
}

void launch_slice_grad(const RowArgs& args, const Rows& grad, const RowGradient* gradients, cudaStream_t) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr bool kFull = decltype(full)::value;
    const int n = args.slicing.n_elements;
    for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
      const RowGradient g = gradients[row];
      const T* x = row_of<T>(args.in.logits, row);
      T* out = row_of<T>(grad, row);
      const Stretch s = stretch(reinterpret_cast<uintptr_t>(out), sizeof(T), 0, n);
      for (int k = args.slicing.n_slices - 1; k >= 0; --k) {
        const WordSlice mine = words_of_slice(args.slicing, s, k);
        for (int first = mine.begin; first < mine.end; first += kTile) {
          for (int i = 0; i < kThreads; ++i) {
            write_words<T, kFull>(out, s, first + i, mine.end, kThreads, g, args.in.softcap, [&](int w) {
              return g.zero ? Word{{0, 0, 0, 0}} : load_elements(x, n, word_element(s, sizeof(T), w));
            });
          }
        }
      }
      for (int i = 0; i < kThreads; ++i) {
        write_partial<T, kFull>(out, s, i, g, args.in.softcap, [&](int e) { return widen(x[e]); });
      }
    }
  });
}

void launch_finish_stats(const RowArgs& args, const TokenOutputs& out, const SoftmaxPart* parts, cudaStream_t) {
  for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
    if (args.in.tokens.live[row]) {
      const SoftmaxPart whole = merge_slices(parts + row * args.slicing.n_slices, args.slicing.n_slices);
      write_stats(out, row, target_logit(args.in, row), base2_scale_of(args, row), whole);
    } else {
      write_dead(out, row);
    }
  }
}

void launch_finish_loss(const LossArgs& args, const SoftmaxPart* parts, RowGradient* gradients, cudaStream_t) {
  for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
    if (args.in.tokens.live[row]) {
      const SoftmaxPart whole = merge_slices(parts + row * args.slicing.n_slices, args.slicing.n_slices);
      gradients[row] = finish_row(args, row, whole);
    } else {
      write_dead_loss(args, row);
      gradients[row] = zero_gradient();
    }
  }
}

void launch_plan_grad(const RowArgs& args, const float* norm, const float* entropy, const float* d_logprobs,
                      const float* d_entropy, RowGradient* gradients, cudaStream_t) {
  for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
    gradients[row] = planned_gradient(args, row, norm, entropy, d_logprobs, d_entropy);
  }
}

void launch_token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                       const TokenOutputs& out, double* losses, cudaStream_t) {
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
  m.def("take_turns", [](unsigned seed) { dapo::cuda::turns = seed; });
  m.def("pretend", [](int multiprocessors, int capability, int shared_bytes, bool cluster_code) {
    const int next = pretended.index + 1;  // launch.cpp asks a device once
    pretended = {next, {multiprocessors, capability / 10, capability % 10, shared_bytes}, cluster_code};
  });
  m.def("slices", [](int n_cols, int itemsize) {
    const dapo::cuda::Slicing s = dapo::cuda::slicing(n_cols, itemsize);
    return std::make_tuple(s.n_slices, s.per_slice, s.fits_cluster());
  });
}
