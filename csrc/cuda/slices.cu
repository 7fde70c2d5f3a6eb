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
  const Slice s = slice_of(args.slicing, at.slice, x);
  const float c = base2_scale_of(args, at.row);
  SoftmaxPart part = thread_part<T, kFull>(x + s.first, s, thread, c, args.in.softcap);
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
  const Place at = place_of_block(args.slicing.n_slices);
  const T* const x = row_of<T>(args.in.logits, at.row);
  T* const out = row_of<T>(grad, at.row);
  const Slice s = slice_of(args.slicing, at.slice, x, out);
  write_gradient<T, kFull>(out + s.first, x + s.first, s, threadIdx.x, kThreads, gradients[at.row], args.in.softcap);
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
