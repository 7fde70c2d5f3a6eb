// The fused loss with one thread block per row: one sweep for the statistics, a second for the gradient over the logits.
// 2 V itemsize bytes read, V itemsize written; the second read comes from the L2 cache as far as the rows in flight fit.
//
// A block has a group of kThreads threads for each of up to kGroups slices, and about 768 threads share an SM: few rows
// are in flight at a time (on 132 SMs 40 MB of 16-bit rows of 152k logits). The second sweep goes backwards and finds
// what was read last.
#include "device.cuh"

#include <type_traits>

#include "../check.h"

namespace dapo {
namespace cuda {
namespace {

// Not 4: 1024 threads leave a thread 64 registers and ptxas spills; 768 leave it 80.
constexpr int kGroups = 3;

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads * kGroups, 1) sweep_loss_kernel(const __grid_constant__ LossArgs args) {
  extern __shared__ SoftmaxPart parts[];  // [n_slices][kWarps], then [n_slices]
  __shared__ RowGradient gradient;
  __shared__ Stretch words;  // of the whole row; in shared memory, registers being short
  const int n_slices = args.slicing.n_slices, n_groups = blockDim.y, n_threads = kThreads * n_groups;
  const int flat = threadIdx.y * kThreads + threadIdx.x, lane = threadIdx.x % kWarp;
  const int row = blockIdx.x;
  {
    T* const x = row_of<T>(args.in.logits, row);
    const uintptr_t address = reinterpret_cast<uintptr_t>(x);
    const Stretch whole_row = stretch(address, sizeof(T), 0, args.slicing.n_elements);
    if (!args.in.tokens.live[row]) {
      write_zeros(x, whole_row, flat, n_threads);
      if (flat == 0) write_dead_loss(args, row);
      return;
    }
    if (flat == 0) words = whole_row;
    const float c = base2_scale_of(args, row);
    for (int k = threadIdx.y; k < n_slices; k += n_groups) {
      const GlobalSource<T> source{x, args.slicing.n_elements, slice_stretch(args.slicing, address, k)};
      SoftmaxPart part = first_part();
      for (int t = 0; t < n_tiles(ceil_div(source.s.n, kElements<T>)); ++t) {
        add_tile<T, kFull>(part, source, t, threadIdx.x, c, args.in.softcap);
      }
      part = merge_lanes<kWarp>(part);
      if (lane == 0) parts[k * kWarps + threadIdx.x / kWarp] = part;
    }
  }
  __syncthreads();
  for (int k = flat / kWarp; k < n_slices; k += n_threads / kWarp) {
    const SoftmaxPart part = merge_warps(&parts[k * kWarps], lane);
    if (lane == 0) parts[n_slices * kWarps + k] = part;
  }
  __syncthreads();
  if (flat < kWarp) {
    const SoftmaxPart whole = merge_slices(parts + n_slices * kWarps, n_slices, lane);
    if (lane == 0) gradient = finish_row(args, row, whole);
  }
  __syncthreads();
  T* const x = row_of<T>(args.in.logits, row);
  const Stretch s = words;
  const RowGradient g = gradient;
  const int tile = kPerThread * n_threads;
  for (int t = ceil_div(s.n_words, tile) - 1; t >= 0; --t) {
    write_words<T, kFull>(x, s, t * tile + flat, s.full_end, n_threads, g, args.in.softcap,
                          [&](int w) { return words_at(x, s.phase)[w]; });
  }
  write_partial<T, kFull>(x, s, flat, g, args.in.softcap, [&](int e) { return widen(x[e]); });
}

}  // namespace

void launch_sweep_loss(const LossArgs& args, cudaStream_t stream) {
  const int n_slices = args.slicing.n_slices;
  const size_t shared = static_cast<size_t>(n_slices) * (kWarps + 1) * sizeof(SoftmaxPart);
  for_variant(args, [&](auto* element, auto full) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr bool kFull = decltype(full)::value;
    const dim3 block(kThreads, min_of(kGroups, n_slices));
    sweep_loss_kernel<T, kFull><<<static_cast<unsigned>(args.in.logits.n_rows), block, shared, stream>>>(args);
    DAPO_CHECK_CUDA(cudaGetLastError());
  });
}

}  // namespace cuda
}  // namespace dapo
