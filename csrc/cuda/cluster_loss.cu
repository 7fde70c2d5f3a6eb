// The fused loss with one row in the shared memory of a thread-block cluster: every logit crosses memory once in, and
// its gradient once out. V itemsize bytes read, V itemsize bytes written.
//
// Block k of a cluster holds slice k. Its words come by bulk copies, a tile at a time, each tile with its own barrier;
// the threads add tiles to their statistics as they arrive; the slices' parts meet in every block's shared memory; each
// block writes its slice's gradient, and as soon as a tile of shared memory has been read for the last time the same
// tile of the cluster's next row is fetched into it. Several clusters share an SM: one computes while others wait.
#include "device.cuh"

#include <map>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "../check.h"

namespace dapo {
namespace cuda {
namespace {

// What a block sends to all of its cluster: 16 bytes.
struct alignas(16) SlicePart {
  SoftmaxPart part;
  float x_target;  // of the slice that holds the target
};

// A live row of the cluster and this block's slice of it. In shared memory: registers are what this kernel is short of.
template <class T> struct RowPlan {
  T* x;
  int row;  // n_rows when there is none left
  Stretch slice;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ inline void wait_barrier(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Volatile: read anew at each use, which is cheaper than a register kept for it.
__device__ inline int cluster_rank() {
  int x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}

__device__ inline int cluster_index() {
  int x;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(x));
  return x;
}

__device__ inline int n_clusters() {
  int x;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(x));
  return x;
}

// Shared memory written before is seen by every block of the cluster after. Not .aligned: a warp may arrive in parts.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// To the same place in the shared memory of another block of the cluster.
__device__ inline void send(SlicePart* place, int rank, const SlicePart& value) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "f"(value.part.top),
               "f"(value.part.sum), "f"(value.part.weighted), "f"(value.x_target)
               : "memory");
}

template <class T> __device__ inline RowPlan<T> plan_row(const LossArgs& args, int row, int step, int rank) {
  const int n_rows = static_cast<int>(args.in.logits.n_rows);
  while (row < n_rows && !args.in.tokens.live[row]) row += step;
  if (row >= n_rows) return {nullptr, n_rows, {}};
  T* const x = row_of<T>(args.in.logits, row);
  return {x, row, slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), rank)};
}

// One thread. Every tile's barrier turns over once per live row, with or without bytes.
template <class T> __device__ inline void fetch(const RowPlan<T>& plan, int tile, Word* words, uint64_t* arrived) {
  const WordRange copy = tile_copy(plan.slice, tile);
  const int bytes = (copy.end - copy.begin) * kWord;
  arrive_expecting(&arrived[tile], bytes);
  if (bytes == 0) return;
  const T* from = plan.x + plan.slice.first + word_element(plan.slice, sizeof(T), copy.begin);
  bulk_load(words + copy.begin, from, bytes, &arrived[tile]);
}

template <class T> __device__ inline T* elements_of(const RowPlan<T>& plan, Word* words) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(words) + plan.slice.phase);
}

// Words that are partly other rows' come by hand.
template <class T> __device__ inline void stage_edges(const RowPlan<T>& plan, Word* words) {
  const Stretch& s = plan.slice;
  if (s.n_partial() == 0) return;
  if (static_cast<int>(threadIdx.x) < s.n_partial()) {
    const int e = s.partial(threadIdx.x);
    elements_of(plan, words)[e] = plan.x[s.first + e];
  }
  __syncthreads();
}

template <class T, bool kFull>
__device__ inline SoftmaxPart slice_stats(const Stretch& s, const Word* words, uint64_t* arrived, int parity, float c,
                                          const Softcap& softcap) {
  const SharedSource<T> source{words, s};
  const int vector_tiles = n_tiles(ceil_div(s.n, kElements<T>)), word_tiles = n_tiles(s.n_words);
  SoftmaxPart part = first_part();
  for (int t = 0, waited = 0; t < vector_tiles; ++t) {
    // The last vector of a tile may straddle into the next.
    for (; waited < min_of(t + 1 + (s.phase != 0), word_tiles); ++waited) wait_barrier(&arrived[waited], parity);
    add_tile<T, kFull>(part, source, t, threadIdx.x, c, softcap);
  }
  return part;
}

template <class T, bool kFull> __device__ inline void cluster_loss(const LossArgs& args) {
  extern __shared__ __align__(128) Word words[];
  __shared__ uint64_t arrived[kMaxTiles];
  __shared__ SoftmaxPart warp_parts[kWarps];
  __shared__ SlicePart slice_parts[2][kMaxCluster];  // of this row and, by a block that is ahead, of the next
  __shared__ RowPlan<T> plans[2];                    // of this row and the next
  __shared__ TokenValues token;
  __shared__ RowGradient gradient;
  __shared__ float scale;

  const int n_slices = args.slicing.n_slices, tiles = args.slicing.n_tiles;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int n_rows = static_cast<int>(args.in.logits.n_rows);  // launch.cpp: fewer than 2^31
  int row = cluster_index();
  if (thread == 0) {
    for (int t = 0; t < tiles; ++t) init_barrier(&arrived[t]);
    publish_barriers();
    plans[0] = plan_row<T>(args, row, n_clusters(), cluster_rank());
    for (int t = 0; t < tiles && plans[0].row < n_rows; ++t) fetch(plans[0], t, words, arrived);
  }
  cluster_sync();
  for (int use = 0;; ++use) {
    const RowPlan<T>& plan = plans[use & 1];
    for (; row < plan.row; row += n_clusters()) {  // dead
      T* const x = row_of<T>(args.in.logits, row);
      const Stretch s = slice_stretch(args.slicing, reinterpret_cast<uintptr_t>(x), cluster_rank());
      write_zeros(x, s, thread, kThreads);
      if (cluster_rank() == 0 && thread == 0) write_dead_loss(args, row);
    }
    if (row >= n_rows) break;
    if (thread == kThreads - 1) {  // what thread 0 will need, while the others begin
      token = token_values(args.in.tokens, row);
      plans[(use + 1) & 1] = plan_row<T>(args, row + n_clusters(), n_clusters(), cluster_rank());
    }
    const float c = base2_scale_of(args, row);
    if (thread == kThreads - 1) scale = c;
    stage_edges(plan, words);
    const SoftmaxPart part =
        merge_lanes<kWarp>(slice_stats<T, kFull>(plan.slice, words, arrived, use & 1, c, args.in.softcap));
    if (lane == 0) warp_parts[warp] = part;
    __syncthreads();
    SlicePart* const parts = slice_parts[use & 1];
    if (warp == 0) {
      SlicePart mine{merge_warps(warp_parts, lane), 0.0f};
      const int at = static_cast<int>(token.target) - plan.slice.first;
      if (at >= 0 && at < plan.slice.n) mine.x_target = widen(elements_of(plan, words)[at]);
      if (lane < n_slices) send(&parts[cluster_rank()], lane, mine);
    }
    cluster_sync();
    if (warp == 0) {
      const SoftmaxPart whole = merge_lanes<kWarp>(lane < n_slices ? parts[lane].part : empty_part());
      if (lane == 0) {
        const int owner = static_cast<int>(token.target) / (args.slicing.per_slice * kElements<T>);
        const float x_target = capped(parts[owner].x_target, args.in.softcap);
        const RowLoss result = finish_loss(token, x_target, args.in.tokens.tau(plan.row), scale,
                                           args.objective, args.entropy_coef, args.out.entropy != nullptr, whole);
        gradient = through_cap(result.gradient, x_target, args.in.softcap);
        if (cluster_rank() == 0) {
          write_loss(args.out, plan.row, result);
          args.losses[plan.row] = result.weighted;
        }
      }
    }
    __syncthreads();
    const RowPlan<T>& next = plans[(use + 1) & 1];
    const Stretch s = plan.slice;
    row = plan.row + n_clusters();
    const RowGradient g = gradient;
    write_partial<T, kFull>(plan.x, s, thread, g, args.in.softcap,
                            [&](int e) { return widen(elements_of(plan, words)[e]); });
    for (int t = 0; t < tiles; ++t) {
      write_words<T, kFull>(plan.x, s, tile_index(t, 0, thread), s.full_end, kThreads, g, args.in.softcap,
                            [&](int w) { return words[w]; });
      __syncthreads();  // tile t of shared memory has been read for the last time
      if (thread == 0 && next.row < n_rows) fetch(next, t, words, arrived);
    }
  }
}

#endif

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, kFull ? 3 : 4) cluster_loss_kernel(const __grid_constant__ LossArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cluster_loss<T, kFull>(args);
#endif
}

// Clusters that fit the device at a time; asked once per kernel, device and slice size.
int resident_clusters(const void* kernel, const cudaLaunchConfig_t& config, const Device& device, int n_slices) {
  static std::mutex lock;
  static std::map<std::tuple<const void*, int, int, size_t>, int> known;
  const std::lock_guard<std::mutex> guard(lock);
  int& clusters = known[{kernel, device.index, n_slices, config.dynamicSmemBytes}];
  if (clusters == 0) {
    const int most = device.shared_bytes - kClusterStaticBytes;
    DAPO_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    DAPO_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared));
    DAPO_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    DAPO_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    if (clusters == 0) throw std::runtime_error("dapo_kernels: this device holds no cluster of that many blocks");
  }
  return clusters;
}

}  // namespace

void launch_cluster_loss(const LossArgs& args, cudaStream_t stream) {
  const int n_slices = args.slicing.n_slices;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(n_slices), 1, 1};
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads);
  config.gridDim = dim3(n_slices);
  config.dynamicSmemBytes = static_cast<size_t>(shared_words(args.slicing)) * kWord;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  for_variant(args, [&](auto* element, auto full) {
    const auto kernel = cluster_loss_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>;
    const int resident =
        resident_clusters(reinterpret_cast<const void*>(kernel), config, current_device(), n_slices);
    const int64_t clusters = min_of<int64_t>(resident, args.in.logits.n_rows);
    config.gridDim = dim3(static_cast<unsigned>(clusters * n_slices));
    DAPO_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, args));
    DAPO_CHECK_CUDA(cudaGetLastError());
  });
}

}  // namespace cuda
}  // namespace dapo
