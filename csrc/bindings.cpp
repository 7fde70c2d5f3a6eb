// dapo_kernels._C: the only file that sees pybind11. Pointers cross as integers (tensor.data_ptr()).
#include <pybind11/pybind11.h>

#include <cmath>

#include "cpu/huge_pages.h"
#include "cpu/row_kernels.h"
#include "cpu/rows.h"
#include "cpu/split_sum.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

dapo::Rows make_rows(uintptr_t data, int64_t n_rows, int64_t n_cols, int64_t inner, int64_t stride_outer,
                     int64_t stride_inner, int dtype) {
  return {pointer<void>(data), n_rows, n_cols, inner, stride_outer, stride_inner, static_cast<dapo::Dtype>(dtype)};
}

dapo::TokenInputs make_inputs(uintptr_t target_ids, uintptr_t live, uintptr_t temperatures, float temperature,
                              uintptr_t weights, uintptr_t advantages, uintptr_t old_logprobs, uintptr_t log_ratio,
                              uintptr_t ref_logprobs, uintptr_t importance_weights) {
  return {pointer<const int64_t>(target_ids), pointer<const uint8_t>(live),       pointer<const float>(temperatures),
          temperature,                        pointer<const float>(weights),      pointer<const float>(advantages),
          pointer<const float>(old_logprobs), pointer<const float>(log_ratio),    pointer<const float>(ref_logprobs),
          pointer<const float>(importance_weights)};
}

dapo::TokenOutputs make_outputs(uintptr_t logprobs, uintptr_t norm, uintptr_t entropy, uintptr_t clip_hit,
                                uintptr_t ref_kl, uintptr_t idle, uintptr_t d_logprobs, uintptr_t d_log_ratio) {
  return {pointer<float>(logprobs), pointer<float>(norm),   pointer<float>(entropy),    pointer<int8_t>(clip_hit),
          pointer<float>(ref_kl),   pointer<uint8_t>(idle), pointer<float>(d_logprobs), pointer<float>(d_log_ratio)};
}

// Argument order: surrogate.ObjectiveScalars.pack().
dapo::Objective make_objective(float surrogate, double clip_low, double clip_high, float dual_clip, float tau_positive,
                               float tau_negative, float kl_coef, float kl_estimator, float kl_through_ratio) {
  return {static_cast<dapo::Surrogate>(static_cast<int>(surrogate)),
          static_cast<dapo::KlEstimator>(static_cast<int>(kl_estimator)),
          static_cast<float>(1.0 - clip_low),
          static_cast<float>(1.0 + clip_high),
          dual_clip,
          tau_positive,
          tau_negative,
          kl_coef,
          kl_through_ratio != 0.0f};
}

std::pair<int, int64_t> find_fault(const dapo::Rows& logits, const dapo::TokenInputs& tokens) {
  const dapo::Fault fault = dapo::find_fault(logits, tokens);
  return {static_cast<int>(fault.kind), fault.row};
}

void row_grad(const dapo::Rows& logits, const dapo::Rows& grad, const dapo::TokenInputs& tokens, uintptr_t norm,
              uintptr_t entropy, uintptr_t d_logprobs, uintptr_t d_entropy, int threads) {
  dapo::row_grad(logits, grad, tokens, pointer<const float>(norm), pointer<const float>(entropy),
                 pointer<const float>(d_logprobs), pointer<const float>(d_entropy), threads);
}

double token_loss(int64_t n, uintptr_t logprobs, const dapo::TokenInputs& tokens, const dapo::Objective& objective,
                  const dapo::TokenOutputs& out) {
  return dapo::token_loss(n, pointer<const float>(logprobs), tokens, objective, out);
}

void add_split(uintptr_t high, uintptr_t low, uintptr_t part, int64_t n, int threads) {
  dapo::add_split(pointer<uint16_t>(high), pointer<uint16_t>(low), pointer<const uint16_t>(part), n, threads);
}

void round_split(uintptr_t high, uintptr_t low, int64_t n, int threads) {
  dapo::round_split(pointer<uint16_t>(high), pointer<const uint16_t>(low), n, threads);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "CPU kernels of dapo_kernels";
  const py::call_guard<py::gil_scoped_release> no_gil;

  py::class_<dapo::Rows>(m, "Rows").def(py::init(&make_rows), "data"_a, "n_rows"_a, "n_cols"_a, "inner"_a,
                                        "stride_outer"_a, "stride_inner"_a, "dtype"_a);
  py::class_<dapo::TokenInputs>(m, "TokenInputs")
      .def(py::init(&make_inputs), py::kw_only(), "target_ids"_a = 0, "live"_a, "temperatures"_a = 0,
           "temperature"_a = 1.0f, "weights"_a = 0, "advantages"_a = 0, "old_logprobs"_a = 0, "log_ratio"_a = 0,
           "ref_logprobs"_a = 0, "importance_weights"_a = 0);
  py::class_<dapo::TokenOutputs>(m, "TokenOutputs")
      .def(py::init(&make_outputs), py::kw_only(), "logprobs"_a = 0, "norm"_a = 0, "entropy"_a = 0, "clip_hit"_a = 0,
           "ref_kl"_a = 0, "idle"_a = 0, "d_logprobs"_a = 0, "d_log_ratio"_a = 0);
  py::class_<dapo::Objective>(m, "Objective").def(py::init(&make_objective));

  m.def("isa", [] { return dapo::row_kernels().isa; });
  m.def("find_fault", &find_fault, no_gil);
  m.def("row_stats", &dapo::row_stats, no_gil, "logits"_a, "tokens"_a, "out"_a, "threads"_a);
  m.def("row_grad", &row_grad, no_gil, "logits"_a, "grad"_a, "tokens"_a, "norm"_a, "entropy"_a, "d_logprobs"_a,
        "d_entropy"_a, "threads"_a);
  m.def("row_loss", &dapo::row_loss, no_gil, "logits"_a, "tokens"_a, "objective"_a, "entropy_coef"_a, "out"_a,
        "threads"_a);
  m.def("token_loss", &token_loss, no_gil, "n"_a, "logprobs"_a, "tokens"_a, "objective"_a, "out"_a);
  m.def("advise_huge_pages", [](uintptr_t data, int64_t bytes) { dapo::advise_huge_pages(pointer<void>(data), bytes); },
        "data"_a, "bytes"_a);
  m.def("add_split", &add_split, no_gil, "high"_a, "low"_a, "part"_a, "n"_a, "threads"_a);
  m.def("round_split", &round_split, no_gil, "high"_a, "low"_a, "n"_a, "threads"_a);
}
