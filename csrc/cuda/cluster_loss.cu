// The fused loss with one row in the shared memory of a thread-block cluster: every logit crosses memory once in, and
// its gradient once out. V itemsize bytes read, V itemsize bytes written.
//
// Block k of a cluster holds slice k. Its words come by bulk copies, a tile at a time, each tile with its own barrier;
// the threads add tiles to their statistics as they arrive; the slices' parts meet in every block's shared memory; each
// block writes its slice's gradient, and as soon as a tile of shared memory has been read for the last time the same
// tile of the cluster's next row is fetched into it. Several clusters share an SM: one computes while others wait.
#include "cluster_row.h"

#include <map>
#include <tuple>
#include <type_traits>

#include "../check.h"

namespace dapo::cuda {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// What cluster_row.h asks for.
struct Hopper {
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static void block_sync() { __syncthreads(); }
  template <int kWidth> __device__ static SoftmaxPart merge(SoftmaxPart part, float c) {
    return merge_lanes<kWidth>(part, c);
  }

  __device__ static void init_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  }

  __device__ static void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  __device__ static void arrive_expecting(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
  }

  __device__ static void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
  }

#define DAPO_WAIT(sem, barrier, parity)                                       \
  asm volatile(                                                               \
      "{\n"                                                                   \
      ".reg .pred done;\n"                                                    \
      "again:\n"                                                              \
      "mbarrier.try_wait.parity" sem ".shared::cta.b64 done, [%0], %1;\n"     \
      "@!done bra again;\n"                                                   \
      "}" ::"r"(shared_address(barrier)),                                     \
      "r"(parity)                                                             \
      : "memory")

  __device__ static void wait(uint64_t* barrier, int parity) { DAPO_WAIT("", barrier, parity); }
  // For what other blocks sent. The wait that acquires it is the second, because each of its tries empties the L1 cache.
  __device__ static void wait_for_cluster(uint64_t* barrier, int parity) {
    wait(barrier, parity);
    DAPO_WAIT(".acquire.cluster", barrier, parity);
  }

  __device__ static int rank() { return static_cast<int>(__clusterRelativeBlockRank()); }
  __device__ static int cluster() { return static_cast<int>(__clusterIdx().x); }
  __device__ static int clusters() { return static_cast<int>(__clusterGridDimInClusters().x); }

  // Every block of the cluster has its barriers. Not .aligned: a warp may arrive in parts.
  __device__ static void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
  }

  // To the same place in another block of the cluster; its barrier, at the same place as this one, counts 16 bytes.
  __device__ static void send(SlicePart* place, int rank, const SlicePart& value, uint64_t* barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 place, barrier;\n"
        "mapa.shared::cluster.u32 place, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [place], {%3, %4, %5, %6}, [barrier];\n"
        "}" ::"r"(shared_address(place)),
        "r"(shared_address(barrier)), "r"(rank), "f"(value.part.max), "f"(value.part.sum), "f"(value.part.weighted),
        "f"(0.0f)
        : "memory");
  }

};

#endif

// The blocks that an SM has registers for. Its 100 KiB of shared memory on 12.x hold two slices: for four blocks ptxas
// would spill registers, and win nothing.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
template <bool kFull> constexpr int kBlocks = 3;
#else
template <bool kFull> constexpr int kBlocks = kFull ? 3 : 4;
#endif

template <class T, bool kFull>
__global__ void __launch_bounds__(kThreads, kBlocks<kFull>) cluster_loss_kernel(const __grid_constant__ LossArgs args) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) Word words[];
  __shared__ ClusterShared shared;
  cluster_loss<Hopper, T, kFull>(args, words, shared);
#endif
}

// Clusters that fit the device at a time; asked once per kernel, device and slice size.
int resident_clusters(const void* kernel, const cudaLaunchConfig_t& config, const Device& device, int n_slices) {
  thread_local std::map<std::tuple<const void*, int, int, size_t>, int> known;
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

bool cluster_code_loaded() {
  cudaFuncAttributes found;
  DAPO_CHECK_CUDA(cudaFuncGetAttributes(&found, cluster_loss_kernel<float, false>));
  return found.ptxVersion >= 90;
}

void launch_cluster_loss(const LossArgs& args) {
  const int n_slices = args.slicing.n_slices;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(n_slices), 1, 1};
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(kThreads);
  config.gridDim = dim3(n_slices);
  config.dynamicSmemBytes = static_cast<size_t>(shared_words(args.slicing)) * kWord;
  config.stream = args.stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  for_variant(args, [&](auto* element, auto full) {
    const auto kernel = cluster_loss_kernel<std::remove_pointer_t<decltype(element)>, decltype(full)::value>;
    const int resident =
        resident_clusters(reinterpret_cast<const void*>(kernel), config, current_device(), n_slices);
    const int64_t clusters = min_of<int64_t>(resident, args.in.logits.n_rows);
    config.gridDim = dim3(static_cast<unsigned>(clusters * n_slices));
    DAPO_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, args));
  });
}

}  // namespace dapo::cuda
