// The fused loss with one thread block per row: one sweep for the statistics, a second for the gradient over the logits.
// 2 V itemsize bytes read, V itemsize written; the second read comes from the L2 cache as far as the rows in flight fit.
//
// A block has a group of kThreads threads for each of up to kGroups slices, and about 768 threads share an SM: few rows
// are in flight at a time (on 132 SMs 40 MB of 16-bit rows of 152k logits), and the caller says where it must be fewer
// still (dapo_kernels/backends/residency.py), but at least one per SM: blocks take rows in turn. The second sweep goes
// backwards and finds what was read last; what it reads and writes leaves the cache first.
#include "rows.h"

namespace dapo::cuda {
namespace {

// Not 4: 1024 threads leave a thread 64 registers and ptxas spills; 768 leave it 80.
constexpr int kGroups = 3;

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads * kGroups, 1) sweep_loss_kernel(const __grid_constant__ LossArgs args) {
  extern __shared__ SoftmaxPart parts[];  // [n_slices][kWarps], then [n_slices]
  __shared__ RowGradient gradient;
  const int n_slices = args.slicing.n_slices, n_groups = blockDim.y, n_threads = kThreads * n_groups;
  const int flat = threadIdx.y * kThreads + threadIdx.x, lane = threadIdx.x % kWarp;
  for (int row = blockIdx.x; row < args.in.logits.n_rows; row += gridDim.x) {
    T* const x = row_of<T>(args.in.logits, row);
    if (args.in.tokens.live[row]) {
      const float c = base2_scale_of(args, row);
      for (int k = threadIdx.y; k < n_slices; k += n_groups) {
        const Slice s = slice_of(args.slicing, k, x);
        SoftmaxPart part = thread_part<T, kFull>(x + s.first, s, threadIdx.x, c, args.in.softcap);
        part = merge_lanes<kWarp>(part, c);
        if (lane == 0) parts[k * kWarps + threadIdx.x / kWarp] = part;
      }
      __syncthreads();
      for (int k = flat / kWarp; k < n_slices; k += n_threads / kWarp) {
        const SoftmaxPart part = merge_lanes<kWarps>(parts[k * kWarps + lane % kWarps], c);
        if (lane == 0) parts[n_slices * kWarps + k] = part;
      }
      __syncthreads();
      if (flat < kWarp) {
        const SoftmaxPart whole = merge_slices(parts + n_slices * kWarps, n_slices, lane, c);
        if (lane == 0) gradient = finish_row(args, row, whole);
      }
    } else if (flat == 0) {
      gradient = finish_dead_row(args, row);
    }
    __syncthreads();
    write_gradient<T, kFull>(x, x, whole_row(args.slicing, x), flat, n_threads, gradient, args.in.softcap);
    __syncthreads();  // everyone has read `gradient`
  }
}

}  // namespace

void launch_sweep_loss(const LossArgs& args) {
  const int n_slices = args.slicing.n_slices;
  const size_t shared = static_cast<size_t>(n_slices) * (kWarps + 1) * sizeof(SoftmaxPart);
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr bool kFull = decltype(full)::value;
    const dim3 block(kThreads, min_of(kGroups, n_slices));
    const auto blocks = static_cast<unsigned>(min_of(args.rows_in_flight, args.in.logits.n_rows));
    sweep_loss_kernel<T, kFull><<<blocks, block, shared, args.stream>>>(args);
  });
}

}  // namespace dapo::cuda
