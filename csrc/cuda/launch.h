// Between the operations (launch.cpp) and the kernels (*.cu): arguments as the kernels take them, and their launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.h"
#include "tiles.h"

namespace dapo {
namespace cuda {

struct RowArgs {
  Operands in;
  Slicing slicing;
  float c;    // base-2 scale of the one temperature
  bool full;  // entropy or softcap: the kernels' longer variant
};

struct LossArgs : RowArgs {
  Objective objective;
  float entropy_coef;
  TokenOutputs out;
  double* losses;
};

// Compute capability as 10 * major + minor; shared memory that one block may have; whether clusters can be launched.
struct Device {
  int index, multiprocessors, capability, shared_bytes;
  bool clusters;
};
Device current_device();

// Whether the code that the current device loads holds the cluster kernel. PTX for 8.x runs on later devices too, and
// the kernel in it is an empty shell.
bool cluster_code_loaded();

// What the cluster kernel keeps in shared memory beside the slice, at most.
constexpr int kClusterStaticBytes = 1024;

void launch_cluster_loss(const LossArgs& args, cudaStream_t stream);
void launch_sweep_loss(const LossArgs& args, cudaStream_t stream);

// parts [n_rows, n_slices] of the live rows.
void launch_slice_stats(const RowArgs& args, SoftmaxPart* parts, cudaStream_t stream);
// The gradient rows that `gradients` [n_rows] describes.
void launch_slice_grad(const RowArgs& args, const Rows& grad, const RowGradient* gradients, cudaStream_t stream);

// From the parts of every row: its statistics; or its loss and the gradient still to be written.
void launch_finish_stats(const RowArgs& args, const TokenOutputs& out, const SoftmaxPart* parts, cudaStream_t stream);
void launch_finish_loss(const LossArgs& args, const SoftmaxPart* parts, RowGradient* gradients, cudaStream_t stream);
// From the statistics of an earlier pass and what arrives at its results.
void launch_plan_grad(const RowArgs& args, const float* norm, const float* entropy, const float* d_logprobs,
                      const float* d_entropy, RowGradient* gradients, cudaStream_t stream);
void launch_token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                       const TokenOutputs& out, double* losses, cudaStream_t stream);

}  // namespace cuda
}  // namespace dapo
