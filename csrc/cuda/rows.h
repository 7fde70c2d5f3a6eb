// One row of logits and its token, for every kernel: where it lies, its target, its results. For the host too.
#pragma once

#include <type_traits>

#include "launch.h"
#include "row_phases.h"

namespace dapo {
namespace cuda {

template <class T> DAPO_HOST_DEVICE T* row_of(const Rows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + rows.offset(row);
}

DAPO_HOST_DEVICE float base2_scale_of(const RowArgs& args, int64_t row) {
  return args.in.tokens.temperatures == nullptr ? args.c : base2_scale(args.in.tokens.temperatures[row]);
}

DAPO_HOST_DEVICE float target_logit(const Operands& in, int64_t row) {
  const int64_t at = in.logits.offset(row) + in.tokens.target_ids[row];
  const void* data = in.logits.data;
  const float x = in.logits.dtype == Dtype::f32    ? static_cast<const float*>(data)[at]
                  : in.logits.dtype == Dtype::bf16 ? widen(static_cast<const bf16*>(data)[at])
                                                   : widen(static_cast<const f16*>(data)[at]);
  return capped(x, in.softcap);
}

DAPO_HOST_DEVICE void write_dead_loss(const LossArgs& args, int64_t row) {
  write_dead(args.out, row);
  args.losses[row] = 0.0;
}

// One thread: results of a live row whose logits are still in memory; returns the gradient row.
DAPO_HOST_DEVICE RowGradient finish_row(const LossArgs& args, int64_t row, const SoftmaxPart& whole) {
  const float x_target = target_logit(args.in, row);
  const RowLoss result =
      finish_loss(token_values(args.in.tokens, row), x_target, args.in.tokens.tau(row), base2_scale_of(args, row),
                  args.objective, args.entropy_coef, args.out.entropy != nullptr, whole);
  write_loss(args.out, row, result);
  args.losses[row] = result.weighted;
  return through_cap(result.gradient, x_target, args.in.softcap);
}

// From the statistics of an earlier pass and what arrives at its results; of a dead row nothing is read.
DAPO_HOST_DEVICE RowGradient planned_gradient(const RowArgs& args, int64_t row, const float* norm,
                                              const float* entropy, const float* d_logprobs, const float* d_entropy) {
  if (!args.in.tokens.live[row]) return zero_gradient();
  const float x_target = target_logit(args.in, row);
  const RowGradient g =
      gradient_of(x_target, args.in.tokens.target_ids[row], args.in.tokens.tau(row), base2_scale_of(args, row),
                  norm[2 * row], norm[2 * row + 1], d_logprobs[row], d_entropy ? d_entropy[row] : 0.0f,
                  d_entropy ? entropy[row] : 0.0f);
  return through_cap(g, x_target, args.in.softcap);
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
