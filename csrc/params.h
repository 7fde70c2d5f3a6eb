// Plain structs of pointers, sizes and strides: what crosses from the bindings to the kernels.
#pragma once

#include <cfloat>
#include <cstdint>

#include "surrogate.h"

namespace dapo {

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Rows of V contiguous elements. Row r starts at (r / inner) * stride_outer + (r % inner) * stride_inner elements:
// [T, V] of any row stride has inner = T; a slice of [B, L, V] has inner = L. With `starts`, on a CPU, rows have lengths
// of their own: row r is the elements [starts[r], starts[r + 1]), and none is longer than n_cols.
struct Rows {
  void* data;
  int64_t n_rows, n_cols;
  int64_t inner, stride_outer, stride_inner;
  Dtype dtype;
  const int64_t* starts;

  DAPO_HOST_DEVICE int64_t offset(int64_t row) const {
    if (inner >= n_rows) return row * stride_inner;  // [T, V]: no division
    return row / inner * stride_outer + row % inner * stride_inner;
  }
};

// Per-token inputs, [n_rows] each; null pointers where a thing was not given.
struct TokenInputs {
  const int64_t* target_ids;  // negative: the row is part of a longer one, and the target in another part of it
  const uint8_t* live;
  const float* temperatures;  // null: `temperature` for every row
  float temperature;
  const float* weights;
  const float* advantages;
  const float* old_logprobs;  // null: on-policy
  const float* log_ratio;     // for the elementwise kernel, in place of old_logprobs
  const float* ref_logprobs;
  const float* importance_weights;

  DAPO_HOST_DEVICE float tau(int64_t row) const { return temperatures ? temperatures[row] : temperature; }
  // Whether the temperature is a positive normal number.
  bool has_temperature(int64_t row) const { return tau(row) >= FLT_MIN && tau(row) <= FLT_MAX; }
};

// Per-token results, [n_rows] each; null pointers where nobody asked.
struct TokenOutputs {
  float* logprobs;
  float* norm;  // [n_rows, 2]: top and sum of the row's SoftmaxPart
  float* entropy;
  int8_t* clip_hit;
  float* ref_kl;
  uint8_t* idle;
  float* d_logprobs;
  float* d_log_ratio;
};

}  // namespace dapo
