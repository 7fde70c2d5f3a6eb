// The plain structs as Python sees them, for both modules. Pointers cross as integers (tensor.data_ptr()).
#pragma once

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "params.h"

namespace dapo {

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

inline Rows make_rows(uintptr_t data, int64_t n_rows, int64_t n_cols, int64_t inner, int64_t stride_outer,
                     int64_t stride_inner, int dtype, uintptr_t starts) {
  return {pointer<void>(data), n_rows, n_cols, inner, stride_outer, stride_inner, static_cast<Dtype>(dtype),
          pointer<const int64_t>(starts)};
}

inline TokenInputs make_inputs(uintptr_t target_ids, uintptr_t live, uintptr_t temperatures, float temperature,
                              uintptr_t weights, uintptr_t advantages, uintptr_t old_logprobs, uintptr_t log_ratio,
                              uintptr_t ref_logprobs, uintptr_t importance_weights) {
  return {pointer<const int64_t>(target_ids), pointer<const uint8_t>(live),       pointer<const float>(temperatures),
          temperature,                        pointer<const float>(weights),      pointer<const float>(advantages),
          pointer<const float>(old_logprobs), pointer<const float>(log_ratio),    pointer<const float>(ref_logprobs),
          pointer<const float>(importance_weights)};
}

inline TokenOutputs make_outputs(uintptr_t logprobs, uintptr_t norm, uintptr_t entropy, uintptr_t clip_hit,
                                uintptr_t ref_kl, uintptr_t idle, uintptr_t d_logprobs, uintptr_t d_log_ratio) {
  return {pointer<float>(logprobs), pointer<float>(norm),   pointer<float>(entropy),    pointer<int8_t>(clip_hit),
          pointer<float>(ref_kl),   pointer<uint8_t>(idle), pointer<float>(d_logprobs), pointer<float>(d_log_ratio)};
}

// The name of this index; one that is not known must not be taken for the last one in a kernel.
template <class Name> Name name_of(float index, Name last, const char* what) {
  if (!(index >= 0.0f && index <= static_cast<float>(last))) {
    throw std::invalid_argument(std::string(what) + ": expected 0 to " + std::to_string(static_cast<int>(last)) +
                                ", got " + std::to_string(index));
  }
  return static_cast<Name>(static_cast<int>(index));
}

// Argument order: surrogate.ObjectiveScalars.pack().
inline Objective make_objective(float surrogate, double clip_low, double clip_high, float dual_clip, float tau_positive,
                               float tau_negative, float kl_coef, float kl_estimator, float kl_through_ratio) {
  return {name_of(surrogate, Surrogate::up, "surrogate"),
          name_of(kl_estimator, KlEstimator::k3, "kl_estimator"),
          static_cast<float>(1.0 - clip_low),
          static_cast<float>(1.0 + clip_high),
          dual_clip,
          tau_positive,
          tau_negative,
          kl_coef,
          kl_through_ratio != 0.0f};
}

// module_local: each of the modules has types of its own.
inline void bind_structs(pybind11::module_& m) {
  using namespace pybind11::literals;
  pybind11::class_<Rows>(m, "Rows", pybind11::module_local())
      .def(pybind11::init(&make_rows), "data"_a, "n_rows"_a, "n_cols"_a, "inner"_a, "stride_outer"_a, "stride_inner"_a,
           "dtype"_a, "starts"_a = 0);
  pybind11::class_<TokenInputs>(m, "TokenInputs", pybind11::module_local())
      .def(pybind11::init(&make_inputs), pybind11::kw_only(), "target_ids"_a = 0, "live"_a, "temperatures"_a = 0,
           "temperature"_a = 1.0f, "weights"_a = 0, "advantages"_a = 0, "old_logprobs"_a = 0, "log_ratio"_a = 0,
           "ref_logprobs"_a = 0, "importance_weights"_a = 0);
  pybind11::class_<TokenOutputs>(m, "TokenOutputs", pybind11::module_local())
      .def(pybind11::init(&make_outputs), pybind11::kw_only(), "logprobs"_a = 0, "norm"_a = 0, "entropy"_a = 0,
           "clip_hit"_a = 0, "ref_kl"_a = 0, "idle"_a = 0, "d_logprobs"_a = 0, "d_log_ratio"_a = 0);
  pybind11::class_<Objective>(m, "Objective", pybind11::module_local()).def(pybind11::init(&make_objective));
}

}  // namespace dapo
