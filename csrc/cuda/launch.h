// Between the operations (launch.cpp) and the kernels (*.cu): arguments as the kernels take them, and their launchers.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.h"
#include "tiles.h"

namespace dapo::cuda {

struct RowArgs {
  Operands in;
  Slicing slicing;
  float c;                 // base-2 scale of the one temperature
  bool full;               // entropy or softcap: the kernels' longer variant
  RowGradient* gradients;  // [n_rows]; with the parts, a workspace
  SoftmaxPart* parts;      // [n_rows, n_slices]; of live rows
  cudaStream_t stream;
};

struct LossArgs : RowArgs {
  Objective objective;
  float entropy_coef;
  TokenOutputs out;
  double* losses;
  int64_t rows_in_flight;  // of sweep_loss, at most
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

void launch_cluster_loss(const LossArgs& args);
void launch_sweep_loss(const LossArgs& args);

// The parts; from them every row's loss and the gradient still to be written, or without `losses` its statistics.
void launch_slice_stats(const RowArgs& args);
void launch_finish(const LossArgs& args);
// The gradient still to be written, from an earlier pass's statistics and what arrives at its results; then `grad`.
void launch_plan_grad(const RowArgs& args, const GradInputs& from);
void launch_slice_grad(const RowArgs& args, const Rows& grad);

}  // namespace dapo::cuda
