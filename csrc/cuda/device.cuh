// What only the device has: warps, barriers, bulk copies, clusters.
#pragma once

#include "launch.h"
#include "row_phases.h"

namespace dapo {
namespace cuda {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Parts of kWidth neighbouring lanes, merged as a tree; every lane gets the same bits, because a + b == b + a.
template <int kWidth> __device__ inline SoftmaxPart merge_lanes(SoftmaxPart part) {
  DAPO_UNROLL
  for (int lanes = kWidth / 2; lanes > 0; lanes /= 2) {
    const SoftmaxPart other{__shfl_xor_sync(0xffffffffu, part.top, lanes),
                            __shfl_xor_sync(0xffffffffu, part.sum, lanes),
                            __shfl_xor_sync(0xffffffffu, part.weighted, lanes)};
    part = merge(part, other);
  }
  return part;
}

// A whole warp merges the parts of a slice's warps; lanes from kWarps on repeat the others.
__device__ inline SoftmaxPart merge_warps(const SoftmaxPart* warp_parts, int lane) {
  return merge_lanes<kWarps>(warp_parts[lane % kWarps]);
}

// A whole warp merges the parts of a row's slices.
__device__ inline SoftmaxPart merge_slices(const SoftmaxPart* parts, int n, int lane) {
  SoftmaxPart part = lane < n ? parts[lane] : empty_part();
  for (int k = lane + kWarp; k < n; k += kWarp) part = merge(part, parts[k]);
  return merge_lanes<kWarp>(part);
}

template <class T> __device__ inline T* row_of(const Rows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + rows.offset(row);
}

__device__ inline float base2_scale_of(const RowArgs& args, int64_t row) {
  return args.in.tokens.temperatures == nullptr ? args.c : base2_scale(args.in.tokens.temperatures[row]);
}

__device__ inline float target_logit(const Operands& in, int64_t row) {
  const int64_t at = in.logits.offset(row) + in.tokens.target_ids[row];
  const void* data = in.logits.data;
  const float x = in.logits.dtype == Dtype::f32    ? static_cast<const float*>(data)[at]
                  : in.logits.dtype == Dtype::bf16 ? widen(static_cast<const bf16*>(data)[at])
                                                   : widen(static_cast<const f16*>(data)[at]);
  return capped(x, in.softcap);
}

__device__ inline void write_dead_loss(const LossArgs& args, int64_t row) {
  write_dead(args.out, row);
  args.losses[row] = 0.0;
}

// One thread: results of a live row whose logits are still in memory; returns the gradient row.
__device__ inline RowGradient finish_row(const LossArgs& args, int64_t row, const SoftmaxPart& whole) {
  const float x_target = target_logit(args.in, row);
  const RowLoss result =
      finish_loss(token_values(args.in.tokens, row), x_target, args.in.tokens.tau(row), base2_scale_of(args, row),
                  args.objective, args.entropy_coef, args.out.entropy != nullptr, whole);
  write_loss(args.out, row, result);
  args.losses[row] = result.weighted;
  return through_cap(result.gradient, x_target, args.in.softcap);
}

// Calls launch(T*, bool constant kFull) for the dtype and variant of `args`.
template <class Launch> void for_variant(const RowArgs& args, Launch launch) {
  const auto both = [&](auto* element) {
    args.full ? launch(element, std::true_type()) : launch(element, std::false_type());
  };
  switch (args.in.logits.dtype) {
    case Dtype::f32: return both(static_cast<float*>(nullptr));
    case Dtype::bf16: return both(static_cast<bf16*>(nullptr));
    case Dtype::f16: return both(static_cast<f16*>(nullptr));
  }
}

}  // namespace cuda
}  // namespace dapo
