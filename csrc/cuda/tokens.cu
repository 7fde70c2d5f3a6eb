// O(T): from a row's parts to its results, and the elementwise objective. One warp, or one thread, per token.
#include "../check.h"
#include "rows.h"

namespace dapo::cuda {
namespace {

constexpr int kBlock = 128;

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; }

// One warp per row.
__global__ void __launch_bounds__(kBlock) finish_kernel(const __grid_constant__ LossArgs args) {
  const int64_t row = thread_index() / kWarp;
  const int lane = threadIdx.x % kWarp, n_slices = args.slicing.n_slices;
  if (row >= args.in.logits.n_rows) return;
  const bool live = args.in.tokens.live[row];
  SoftmaxPart whole = empty_part();
  if (live) whole = merge_slices(args.parts + row * n_slices, n_slices, lane, base2_scale_of(args, row));
  if (lane == 0) finish(args, row, whole);
}

// Before any gradient is written: with the gradient over the logits a block of slice_grad_kernel would overwrite the
// target's logit while another still needs it.
__global__ void __launch_bounds__(kBlock)
    plan_grad_kernel(const __grid_constant__ RowArgs args, const __grid_constant__ GradInputs from) {
  const int64_t row = thread_index();
  if (row < args.in.logits.n_rows) args.gradients[row] = planned_gradient(args, row, from);
}

__global__ void __launch_bounds__(kBlock)
    token_loss_kernel(int64_t n, const float* logprobs, const __grid_constant__ TokenInputs tokens,
                      const __grid_constant__ Objective objective, const __grid_constant__ TokenOutputs out,
                      double* losses) {
  const int64_t i = thread_index();
  if (i < n) losses[i] = write_token_loss(i, logprobs, tokens, objective, out);
}

unsigned blocks(int64_t threads) { return static_cast<unsigned>(ceil_div<int64_t>(threads, kBlock)); }

}  // namespace

void launch_finish(const LossArgs& args) {
  finish_kernel<<<blocks(args.in.logits.n_rows * kWarp), kBlock, 0, args.stream>>>(args);
}

void launch_plan_grad(const RowArgs& args, const GradInputs& from) {
  plan_grad_kernel<<<blocks(args.in.logits.n_rows), kBlock, 0, args.stream>>>(args, from);
}

void token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                const TokenOutputs& out, double* losses, uintptr_t stream) {
  if (n == 0) return;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  token_loss_kernel<<<blocks(n), kBlock, 0, on>>>(n, logprobs, tokens, objective, out, losses);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

}  // namespace dapo::cuda
