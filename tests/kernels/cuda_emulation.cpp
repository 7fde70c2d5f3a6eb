// The launchers of csrc/cuda/launch.h on the host: the kernels' own headers, under launch.cpp as it is. Built by
// test_elsewhere.py in place of the .cu files.
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

SoftmaxPart merge_slices(const SoftmaxPart* slices, int n, float c) {
  std::vector<SoftmaxPart> lanes(kWarp, empty_part());
  for (int k = 0; k < n; ++k) lanes[k % kWarp] = k < kWarp ? slices[k] : merge(lanes[k % kWarp], slices[k], c);
  return merge_tree(lanes, c);
}

// A GPU has no 16-byte access between two boundaries.
void check_words(const Slice& s, const void* x) {
  if (s.n_words > 0 && reinterpret_cast<uintptr_t>(x) % kWord != 0) throw std::logic_error("words that are not aligned");
}

template <class T, bool kFull> SoftmaxPart slice_part(const RowArgs& args, int64_t row, int k) {
  const T* x = row_of<T>(args.in.logits, row);
  const Slice s = slice_of(args.slicing, k, x);
  check_words(s, x + s.first);
  const float c = base2_scale_of(args, row);
  std::vector<SoftmaxPart> threads, warps;
  for (int i = 0; i < kThreads; ++i) threads.push_back(thread_part<T, kFull>(x + s.first, s, i, c, args.in.softcap));
  for (int w = 0; w < kWarps; ++w) {
    warps.push_back(merge_tree({threads.begin() + w * kWarp, threads.begin() + (w + 1) * kWarp}, c));
  }
  return merge_tree(warps, c);
}

template <class T, bool kFull>
void gradient(T* out, const T* x, const Slice& s, int n_threads, const RowGradient& g, const Softcap& softcap) {
  check_words(s, out);
  check_words(s, x);
  for (int i = 0; i < n_threads; ++i) write_gradient<T, kFull>(out, x, s, i, n_threads, g, softcap);
}

}  // namespace

bool cluster_code_loaded() { return pretended.cluster_code; }

void launch_cluster_loss(const LossArgs& args) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    for (int k = 0; k < kClusters; ++k) {
      HostCluster cluster(args.slicing.n_slices, shared_words(args.slicing), k, kClusters, turns++);
      cluster.run([&](int rank) {
        cluster_loss<HostCluster::Machine, T, decltype(full)::value>(args, cluster.words(rank), cluster.shared(rank));
      });
    }
  });
}

void launch_sweep_loss(const LossArgs& args) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr bool kFull = decltype(full)::value;
    for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
      T* x = row_of<T>(args.in.logits, row);
      RowGradient g = zero_gradient();
      if (args.in.tokens.live[row]) {
        std::vector<SoftmaxPart> parts;
        for (int k = 0; k < args.slicing.n_slices; ++k) parts.push_back(slice_part<T, kFull>(args, row, k));
        g = finish_row(args, row, merge_slices(parts.data(), args.slicing.n_slices, base2_scale_of(args, row)));
      } else {
        finish_dead_row(args, row);
      }
      gradient<T, kFull>(x, x, whole_row(args.slicing, x), 3 * kThreads, g, args.in.softcap);
    }
  });
}

void launch_slice_stats(const RowArgs& args) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    const int n = args.slicing.n_slices;
    for (int64_t i = 0; i < args.in.logits.n_rows * n; ++i) {
      if (args.in.tokens.live[i / n]) {
        args.parts[i] = slice_part<T, decltype(full)::value>(args, i / n, static_cast<int>(i % n));
      }
    }
  });
}

void launch_slice_grad(const RowArgs& args, const Rows& grad) {
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
      const T* x = row_of<T>(args.in.logits, row);
      T* out = row_of<T>(grad, row);
      for (int k = args.slicing.n_slices - 1; k >= 0; --k) {
        const Slice s = slice_of(args.slicing, k, x, out);
        const RowGradient g = args.gradients[row];
        gradient<T, decltype(full)::value>(out + s.first, x + s.first, s, kThreads, g, args.in.softcap);
      }
    }
  });
}

void launch_finish(const LossArgs& args) {
  const int n = args.slicing.n_slices;
  for (int64_t row = 0; row < args.in.logits.n_rows; ++row) {
    SoftmaxPart whole = empty_part();
    if (args.in.tokens.live[row]) whole = merge_slices(args.parts + row * n, n, base2_scale_of(args, row));
    finish(args, row, whole);
  }
}

void launch_plan_grad(const RowArgs& args, const GradInputs& from) {
  for (int64_t row = 0; row < args.in.logits.n_rows; ++row) args.gradients[row] = planned_gradient(args, row, from);
}

void token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                const TokenOutputs& out, double* losses, uintptr_t) {
  for (int64_t i = 0; i < n; ++i) losses[i] = write_token_loss(i, logprobs, tokens, objective, out);
}

}  // namespace cuda
}  // namespace dapo

PYBIND11_MODULE(cuda_coverage, m) {
  m.def("take_turns", [](unsigned seed) { dapo::cuda::turns = seed; });
  m.def("pretend", [](int multiprocessors, int capability, int shared_bytes, bool cluster_code) {
    const int next = pretended.index + 1;  // launch.cpp asks a device once
    pretended = {next, {multiprocessors, capability / 10, capability % 10, shared_bytes}, cluster_code};
  });
  m.def("polynomial_exp2", &dapo::cuda::polynomial_exp2);
  m.def("other_base2_scales", [] {  // than the host's, of all temperatures in [1, 2): others differ in the exponent
    int n = 0;
    for (uint32_t bits = 0x3f800000u; bits < 0x40000000u; ++bits) {
      const float tau = dapo::cuda::bits_as<float>(bits);
      n += dapo::base2_scale<dapo::DoubleFloat>(tau) != dapo::base2_scale(tau);
    }
    return n;
  });
  m.def("scalars", [](float x, float max, float sum, float weighted, float tau, float w, float v) {
    const auto of = [&](auto zero) {
      using Wide = decltype(zero);
      const float c = dapo::base2_scale<Wide>(tau);
      const dapo::SoftmaxPart whole{max, sum, weighted};
      const float entropy = dapo::entropy_of<Wide>(whole);
      const dapo::RowGradient g = dapo::gradient_of<Wide>(x, 0, tau, c, max, sum, w, v, entropy);
      return std::make_tuple(dapo::logprob_of<Wide>(x, c, whole), entropy, g.a, g.b, g.at_target);
    };
    return std::make_tuple(of(dapo::DoubleFloat()), of(0.0));
  });
  m.def("slices", [](int n_cols, int itemsize) {
    const dapo::cuda::Slicing s = dapo::cuda::slicing(n_cols, itemsize);
    return std::make_tuple(s.n_slices, s.per_slice, s.n_slices <= dapo::cuda::kMaxCluster);
  });
}
