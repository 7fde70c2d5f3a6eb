// O(T): from a row's parts to its results, and the elementwise objective. One warp, or one thread, per token.
#include "device.cuh"

#include "../check.h"

namespace dapo {
namespace cuda {
namespace {

constexpr int kBlock = 128;

__device__ inline int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; }

__global__ void __launch_bounds__(kBlock)
    finish_stats_kernel(const __grid_constant__ RowArgs args, const __grid_constant__ TokenOutputs out,
                        const SoftmaxPart* parts) {
  const int64_t row = thread_index() / kWarp;
  const int lane = threadIdx.x % kWarp, n_slices = args.slicing.n_slices;
  if (row >= args.in.logits.n_rows) return;
  if (!args.in.tokens.live[row]) {
    if (lane == 0) write_dead(out, row);
    return;
  }
  const SoftmaxPart whole = merge_slices(parts + row * n_slices, n_slices, lane);
  if (lane == 0) write_stats(out, row, target_logit(args.in, row), base2_scale_of(args, row), whole);
}

__global__ void __launch_bounds__(kBlock)
    finish_loss_kernel(const __grid_constant__ LossArgs args, const SoftmaxPart* parts, RowGradient* gradients) {
  const int64_t row = thread_index() / kWarp;
  const int lane = threadIdx.x % kWarp, n_slices = args.slicing.n_slices;
  if (row >= args.in.logits.n_rows) return;
  if (!args.in.tokens.live[row]) {
    if (lane == 0) {
      write_dead_loss(args, row);
      gradients[row] = zero_gradient();
    }
    return;
  }
  const SoftmaxPart whole = merge_slices(parts + row * n_slices, n_slices, lane);
  if (lane == 0) gradients[row] = finish_row(args, row, whole);
}

// Before any gradient is written: with the gradient over the logits a block of slice_grad_kernel would overwrite the
// target's logit while another still needs it.
__global__ void __launch_bounds__(kBlock)
    plan_grad_kernel(const __grid_constant__ RowArgs args, const float* norm, const float* entropy,
                     const float* d_logprobs, const float* d_entropy, RowGradient* gradients) {
  const int64_t row = thread_index();
  if (row < args.in.logits.n_rows) {
    gradients[row] = planned_gradient(args, row, norm, entropy, d_logprobs, d_entropy);
  }
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

void launch_finish_stats(const RowArgs& args, const TokenOutputs& out, const SoftmaxPart* parts, cudaStream_t stream) {
  finish_stats_kernel<<<blocks(args.in.logits.n_rows * kWarp), kBlock, 0, stream>>>(args, out, parts);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

void launch_finish_loss(const LossArgs& args, const SoftmaxPart* parts, RowGradient* gradients, cudaStream_t stream) {
  finish_loss_kernel<<<blocks(args.in.logits.n_rows * kWarp), kBlock, 0, stream>>>(args, parts, gradients);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

void launch_plan_grad(const RowArgs& args, const float* norm, const float* entropy, const float* d_logprobs,
                      const float* d_entropy, RowGradient* gradients, cudaStream_t stream) {
  plan_grad_kernel<<<blocks(args.in.logits.n_rows), kBlock, 0, stream>>>(args, norm, entropy, d_logprobs, d_entropy,
                                                                         gradients);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

void launch_token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                       const TokenOutputs& out, double* losses, cudaStream_t stream) {
  token_loss_kernel<<<blocks(n), kBlock, 0, stream>>>(n, logprobs, tokens, objective, out, losses);
  DAPO_CHECK_CUDA(cudaGetLastError());
}

}  // namespace cuda
}  // namespace dapo
