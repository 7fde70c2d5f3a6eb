// dapo_kernels._C: with bindings_cuda.cpp and bindings_structs.h the only files that see pybind11.
#include <pybind11/pybind11.h>

#include <cmath>

#include "bindings_structs.h"
#include "cpu/huge_pages.h"
#include "cpu/kept.h"
#include "cpu/row_kernels.h"
#include "cpu/rows.h"
#include "cpu/split_sum.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using dapo::pointer;

std::pair<int, int64_t> find_fault(const dapo::Rows& logits, const dapo::TokenInputs& tokens) {
  const dapo::Fault fault = dapo::find_fault(logits, tokens);
  return {static_cast<int>(fault.kind), fault.row};
}

void row_grad(const dapo::Rows& logits, const dapo::Rows& grad, const dapo::TokenInputs& tokens, uintptr_t norm,
              uintptr_t entropy, uintptr_t d_logprobs, uintptr_t d_entropy, bool zeroed, int threads) {
  dapo::row_grad(logits, grad, tokens, pointer<const float>(norm), pointer<const float>(entropy),
                 pointer<const float>(d_logprobs), pointer<const float>(d_entropy), zeroed, threads);
}

double token_loss(int64_t n, uintptr_t logprobs, const dapo::TokenInputs& tokens, const dapo::Objective& objective,
                  const dapo::TokenOutputs& out) {
  return dapo::token_loss(n, pointer<const float>(logprobs), tokens, objective, out);
}

bool gather_kept(const dapo::Rows& logits, const dapo::TokenInputs& tokens, uintptr_t ids, bool partial,
                 const dapo::Rows& kept, uintptr_t places, int threads) {
  const dapo::KeptIds list = {pointer<const int64_t>(ids), kept.starts};
  return dapo::gather_kept(logits, tokens, list, partial, kept, pointer<int64_t>(places), threads);
}

void scatter_kept(const dapo::Rows& kept, const dapo::TokenInputs& tokens, uintptr_t ids, const dapo::Rows& out,
                  int threads) {
  dapo::scatter_kept(kept, tokens, {pointer<const int64_t>(ids), kept.starts}, out, threads);
}

int64_t find_repeated(uintptr_t ids, uintptr_t starts, uintptr_t live, int64_t n_rows, int threads) {
  const dapo::KeptIds list = {pointer<const int64_t>(ids), pointer<const int64_t>(starts)};
  return dapo::find_repeated(list, pointer<const uint8_t>(live), n_rows, threads);
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
  m.attr("sources") = DAPO_SOURCES;
#if defined(_OPENMP)
  m.attr("openmp") = true;
#else
  m.attr("openmp") = false;
#endif
  const py::call_guard<py::gil_scoped_release> no_gil;

  dapo::bind_structs(m);

  m.def("isa", [] { return dapo::row_kernels().isa; });
  m.def("find_fault", &find_fault, no_gil);
  m.def("row_stats", &dapo::row_stats, no_gil, "logits"_a, "tokens"_a, "out"_a, "threads"_a);
  m.def("row_slopes", &dapo::row_slopes, no_gil, "logits"_a, "tokens"_a, "objective"_a, "entropy_coef"_a, "out"_a,
        "threads"_a);
  m.def("row_grad", &row_grad, no_gil, "logits"_a, "grad"_a, "tokens"_a, "norm"_a, "entropy"_a, "d_logprobs"_a,
        "d_entropy"_a, "zeroed"_a, "threads"_a);
  m.def("row_loss", &dapo::row_loss, no_gil, "logits"_a, "tokens"_a, "objective"_a, "entropy_coef"_a, "out"_a,
        "threads"_a);
  m.def("token_loss", &token_loss, no_gil, "n"_a, "logprobs"_a, "tokens"_a, "objective"_a, "out"_a);
  m.def("gather_kept", &gather_kept, no_gil, "logits"_a, "tokens"_a, "ids"_a, "partial"_a, "kept"_a, "places"_a,
        "threads"_a);
  m.def("scatter_kept", &scatter_kept, no_gil, "kept"_a, "tokens"_a, "ids"_a, "out"_a, "threads"_a);
  m.def("find_repeated", &find_repeated, no_gil, "ids"_a, "starts"_a, "live"_a, "n_rows"_a, "threads"_a);
  m.def("advise_huge_pages", [](uintptr_t data, int64_t bytes) { dapo::advise_huge_pages(pointer<void>(data), bytes); },
        "data"_a, "bytes"_a);
  m.def("add_split", &add_split, no_gil, "high"_a, "low"_a, "part"_a, "n"_a, "threads"_a);
  m.def("round_split", &round_split, no_gil, "high"_a, "low"_a, "n"_a, "threads"_a);
}
