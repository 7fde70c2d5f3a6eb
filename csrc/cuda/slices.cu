// One thread block per slice of a row: statistics alone (V itemsize bytes read), and the gradient alone (as much read, as
// much written). Log-probs without a gradient, gradients of log-probs and entropies, and the loss of few, wide rows.
#include "device.cuh"

#include <type_traits>

#include "../check.h"

namespace dapo {
namespace cuda {
namespace {

struct Place {
  int64_t row;
  int slice;
};

__device__ inline Place place_of_block(int n_slices) {
  return {blockIdx.x / n_slices, static_cast<int>(blockIdx.x % n_slices)};
}

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, 4)
    slice_stats_kernel(const __grid_constant__ RowArgs args, SoftmaxPart* parts) {
  __shared__ SoftmaxPart warp_parts[kWarps];
  const Place at = place_of_block(args.slicing.n_slices);
  if (!args.in.tokens.live[at.row]) return;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const T* const x = row_of<T>(args.in.logits, at.row);
  const Stretch s = slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), at.slice);
  const GlobalSource<T> source{x, args.slicing.n_elements, s};
  const float c = base2_scale_of(args, at.row);
  SoftmaxPart part = first_part();
  for (int t = 0; t < n_tiles(ceil_div(s.n, kElements<T>)); ++t) {
    add_tile<T, kFull>(part, source, t, thread, c, args.in.softcap);
  }
  part = merge_lanes<kWarp>(part);
  if (lane == 0) warp_parts[warp] = part;
  __syncthreads();
  if (warp == 0) {
    part = merge_warps(warp_parts, lane);
    if (lane == 0) parts[at.row * args.slicing.n_slices + at.slice] = part;
  }
}

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, 4)
    slice_grad_kernel(const __grid_constant__ RowArgs args, const __grid_constant__ Rows grad,
                      const RowGradient* gradients) {
  const int n = args.slicing.n_elements;
  const Place at = place_of_block(args.slicing.n_slices);
  const RowGradient g = gradients[at.row];
  const T* const x = row_of<T>(args.in.logits, at.row);
  T* const out = row_of<T>(grad, at.row);
  const Stretch s = stretch(reinterpret_cast<uintptr_t>(out), sizeof(T), 0, n);
  const WordSlice mine = words_of_slice(args.slicing, s, at.slice);
  for (int first = mine.begin; first < mine.end; first += kTile) {
    write_words<T, kFull>(out, s, first + static_cast<int>(threadIdx.x), mine.end, kThreads, g, args.in.softcap,
                          [&](int w) {
                            return g.zero ? Word{{0, 0, 0, 0}} : load_elements(x, n, word_element(s, sizeof(T), w));
                          });
  }
  if (at.slice == 0) {
    write_partial<T, kFull>(out, s, threadIdx.x, g, args.in.softcap, [&](int e) { return widen(x[e]); });
  }
}

unsigned blocks(const RowArgs& args) {
  return static_cast<unsigned>(args.in.logits.n_rows * args.slicing.n_slices);
}

}  // namespace

void launch_slice_stats(const RowArgs& args, SoftmaxPart* parts, cudaStream_t stream) {
  for_variant(args, [&](auto* element, auto full) {
    slice_stats_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>
        <<<blocks(args), kThreads, 0, stream>>>(args, parts);
    DAPO_CHECK_CUDA(cudaGetLastError());
  });
}

void launch_slice_grad(const RowArgs& args, const Rows& grad, const RowGradient* gradients, cudaStream_t stream) {
  for_variant(args, [&](auto* element, auto full) {
    slice_grad_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>
        <<<blocks(args), kThreads, 0, stream>>>(args, grad, gradients);
    DAPO_CHECK_CUDA(cudaGetLastError());
  });
}

}  // namespace cuda
}  // namespace dapo
