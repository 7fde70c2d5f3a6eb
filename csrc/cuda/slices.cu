// One thread block per slice of a row: statistics alone (V itemsize bytes read), and the gradient alone (as much read, as
// much written). Log-probs without a gradient, gradients of log-probs and entropies, and the loss of few, wide rows.
#include "rows.h"

namespace dapo::cuda {
namespace {

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, 4)
    slice_stats_kernel(const __grid_constant__ RowArgs args) {
  __shared__ SoftmaxPart warp_parts[kWarps];
  const int64_t row = blockIdx.x / args.slicing.n_slices;
  const int slice = blockIdx.x % args.slicing.n_slices;
  if (!args.in.tokens.live[row]) return;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const T* const x = row_of<T>(args.in.logits, row);
  const Slice s = slice_of(args.slicing, slice, x);
  const float c = base2_scale_of(args, row);
  SoftmaxPart part = thread_part<T, kFull>(x + s.first, s, thread, c, args.in.softcap);
  part = merge_lanes<kWarp>(part, c);
  if (lane == 0) warp_parts[warp] = part;
  __syncthreads();
  if (warp == 0) {
    part = merge_lanes<kWarps>(warp_parts[lane % kWarps], c);
    if (lane == 0) args.parts[blockIdx.x] = part;
  }
}

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, 4)
    slice_grad_kernel(const __grid_constant__ RowArgs args, const __grid_constant__ Rows grad) {
  const int64_t row = blockIdx.x / args.slicing.n_slices;
  const int slice = blockIdx.x % args.slicing.n_slices;
  const T* const x = row_of<T>(args.in.logits, row);
  T* const out = row_of<T>(grad, row);
  const Slice s = slice_of(args.slicing, slice, x, out);
  const RowGradient g = args.gradients[row];
  write_gradient<T, kFull>(out + s.first, x + s.first, s, threadIdx.x, kThreads, g, args.in.softcap);
}

unsigned blocks(const RowArgs& args) {
  return static_cast<unsigned>(args.in.logits.n_rows * args.slicing.n_slices);
}

}  // namespace

void launch_slice_stats(const RowArgs& args) {
  for_variant(args, [&](auto* element, auto full) {
    slice_stats_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>
        <<<blocks(args), kThreads, 0, args.stream>>>(args);
  });
}

void launch_slice_grad(const RowArgs& args, const Rows& grad) {
  for_variant(args, [&](auto* element, auto full) {
    slice_grad_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>
        <<<blocks(args), kThreads, 0, args.stream>>>(args, grad);
  });
}

}  // namespace dapo::cuda
