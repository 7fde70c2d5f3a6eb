// Which kernels an operation launches.
#include "launch.h"

#include <map>
#include <stdexcept>
#include <string>

#include "../check.h"

namespace dapo::cuda {
namespace {

constexpr int kItemSize[3] = {4, 2, 2};
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

Slicing slicing_of(const Rows& rows) {
  if (rows.n_cols > kMaxColumns || rows.n_rows > kMaxBlocks / kMaxSlices) {
    throw std::invalid_argument("dapo_kernels: logits of " + std::to_string(rows.n_rows) + " x " +
                                std::to_string(rows.n_cols) + " exceed what a kernel's grid covers");
  }
  return slicing(static_cast<int>(rows.n_cols), kItemSize[static_cast<int>(rows.dtype)]);
}

RowArgs row_args(const Operands& in, bool full, void* workspace, uintptr_t stream) {
  const float c = in.tokens.temperatures == nullptr ? base2_scale(in.tokens.temperature) : 0.0f;
  auto* const gradients = static_cast<RowGradient*>(workspace);
  return {in, slicing_of(in.logits), c, full || in.softcap.value != 0.0f, gradients,
          reinterpret_cast<SoftmaxPart*>(gradients + in.logits.n_rows), reinterpret_cast<cudaStream_t>(stream)};
}

// Rows that start on 16 bytes, on a device with clusters; those of more than 8 blocks are known of 9.0 and 10.x only.
bool cluster_runs(const Device& device, const Rows& rows, const Slicing& s) {
  const int64_t strides = (rows.stride_inner | rows.stride_outer) * s.itemsize;
  const bool aligned = (reinterpret_cast<intptr_t>(rows.data) | strides) % kWord == 0;
  const int most = device.capability < 110 ? kMaxCluster : 8;
  return device.clusters && aligned && s.n_elements > 0 && s.n_slices <= most &&
         shared_words(s) * kWord + kClusterStaticBytes <= device.shared_bytes;
}

// Fewer rows than multiprocessors leave some of them without a row to sweep.
Path choose(const Device& device, const Rows& rows, const Slicing& s) {
  if (cluster_runs(device, rows, s)) return Path::cluster;
  return rows.n_rows < device.multiprocessors && s.n_slices > 1 ? Path::split : Path::sweep;
}

}  // namespace

Device current_device() {
  thread_local std::map<int, Device> known;
  int index;
  DAPO_CHECK_CUDA(cudaGetDevice(&index));
  Device& device = known[index];
  if (device.multiprocessors == 0) {
    const auto get = [&](cudaDeviceAttr what) {
      int value;
      DAPO_CHECK_CUDA(cudaDeviceGetAttribute(&value, what, index));
      return value;
    };
    device = {index, get(cudaDevAttrMultiProcessorCount),
              10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor),
              get(cudaDevAttrMaxSharedMemoryPerBlockOptin), false};
    device.clusters = device.capability >= 90 && cluster_code_loaded();
  }
  return device;
}

std::string device_error() {
  int count;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // or the next, innocent call would report it again
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

int64_t workspace_bytes(const Rows& logits) {
  const int64_t per_row = sizeof(RowGradient) + slicing_of(logits).n_slices * sizeof(SoftmaxPart);
  return logits.n_rows * per_row;
}

Path choose_path(const Rows& logits) { return choose(current_device(), logits, slicing_of(logits)); }

void row_stats(const Operands& in, const TokenOutputs& out, void* workspace, uintptr_t stream) {
  if (in.logits.n_rows == 0) return;
  const LossArgs args{row_args(in, out.entropy != nullptr, workspace, stream), {}, 0.0f, out, nullptr, 0};
  launch_slice_stats(args);
  launch_finish(args);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

void row_grad(const Operands& in, const Rows& grad, const GradInputs& from, void* workspace, uintptr_t stream) {
  if (in.logits.n_rows == 0) return;
  const RowArgs args = row_args(in, from.d_entropy != nullptr, workspace, stream);
  launch_plan_grad(args, from);
  launch_slice_grad(args, grad);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

void row_loss(const Operands& in, const Objective& objective, float entropy_coef, const TokenOutputs& out,
              double* losses, void* workspace, Path path, int64_t rows_in_flight, uintptr_t stream) {
  if (in.logits.n_rows == 0) return;
  const LossArgs args{row_args(in, out.entropy != nullptr, workspace, stream), objective, entropy_coef, out, losses,
                      rows_in_flight};
  const Device device = current_device();
  if (path == Path::automatic) path = choose(device, in.logits, args.slicing);
  if (path == Path::cluster) {
    if (!cluster_runs(device, in.logits, args.slicing)) {
      const int capability = device.capability;
      throw std::invalid_argument("dapo_kernels: no cluster holds these rows of " + std::to_string(in.logits.n_cols) +
                                  " logits: too long for compute capability " + std::to_string(capability / 10) + "." +
                                  std::to_string(capability % 10) + ", not on 16 bytes, or no code for the device");
    }
    launch_cluster_loss(args);
  } else if (path == Path::sweep) {
    launch_sweep_loss(args);
  } else {
    launch_slice_stats(args);
    launch_finish(args);
    launch_slice_grad(args, in.logits);
  }
  DAPO_CHECK_CUDA(cudaGetLastError());
}

}  // namespace dapo::cuda
