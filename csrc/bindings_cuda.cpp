// dapo_kernels._cuda: operations on device memory, on a given stream. Imports without a GPU; nothing runs until called.
#include <pybind11/pybind11.h>

#include "bindings_structs.h"
#include "cuda/kernels.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using dapo::pointer;
namespace cuda = dapo::cuda;

cuda::Operands operands(const dapo::Rows& logits, const dapo::TokenInputs& tokens, float softcap) {
  return {logits, tokens, {softcap, softcap == 0.0f ? 0.0f : 1.0f / softcap}};
}

void row_stats(const dapo::Rows& logits, const dapo::TokenInputs& tokens, float softcap, const dapo::TokenOutputs& out,
               uintptr_t workspace, uintptr_t stream) {
  cuda::row_stats(operands(logits, tokens, softcap), out, pointer<void>(workspace), stream);
}

void row_grad(const dapo::Rows& logits, const dapo::TokenInputs& tokens, float softcap, const dapo::Rows& grad,
              uintptr_t norm, uintptr_t entropy, uintptr_t d_logprobs, uintptr_t d_entropy, uintptr_t workspace,
              uintptr_t stream) {
  const cuda::GradInputs from{pointer<const float>(norm), pointer<const float>(entropy),
                              pointer<const float>(d_logprobs), pointer<const float>(d_entropy)};
  cuda::row_grad(operands(logits, tokens, softcap), grad, from, pointer<void>(workspace), stream);
}

void row_loss(const dapo::Rows& logits, const dapo::TokenInputs& tokens, float softcap,
              const dapo::Objective& objective, float entropy_coef, const dapo::TokenOutputs& out, uintptr_t losses,
              uintptr_t workspace, cuda::Path path, int64_t rows_in_flight, uintptr_t stream) {
  cuda::row_loss(operands(logits, tokens, softcap), objective, entropy_coef, out, pointer<double>(losses),
                 pointer<void>(workspace), path, rows_in_flight, stream);
}

void token_loss(int64_t n, uintptr_t logprobs, const dapo::TokenInputs& tokens, const dapo::Objective& objective,
                const dapo::TokenOutputs& out, uintptr_t losses, uintptr_t stream) {
  cuda::token_loss(n, pointer<const float>(logprobs), tokens, objective, out, pointer<double>(losses), stream);
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of dapo_kernels";
  m.attr("architectures") = DAPO_CUDA_ARCHS;
  m.attr("toolkit") = DAPO_CUDA_TOOLKIT;
  m.attr("sources") = DAPO_SOURCES;
  const py::call_guard<py::gil_scoped_release> no_gil;

  dapo::bind_structs(m);
  py::enum_<cuda::Path>(m, "Path", py::module_local())
      .value("automatic", cuda::Path::automatic)
      .value("cluster", cuda::Path::cluster)
      .value("sweep", cuda::Path::sweep)
      .value("split", cuda::Path::split);

  m.def("device_error", &cuda::device_error, no_gil);
  m.def("workspace_bytes", &cuda::workspace_bytes, "logits"_a);
  m.def("choose_path", &cuda::choose_path, no_gil, "logits"_a);
  m.def("row_stats", &row_stats, no_gil, "logits"_a, "tokens"_a, "softcap"_a, "out"_a, "workspace"_a, "stream"_a);
  m.def("row_grad", &row_grad, no_gil, "logits"_a, "tokens"_a, "softcap"_a, "grad"_a, "norm"_a, "entropy"_a,
        "d_logprobs"_a, "d_entropy"_a, "workspace"_a, "stream"_a);
  m.def("row_loss", &row_loss, no_gil, "logits"_a, "tokens"_a, "softcap"_a, "objective"_a, "entropy_coef"_a, "out"_a,
        "losses"_a, "workspace"_a, "path"_a, "rows_in_flight"_a, "stream"_a);
  m.def("token_loss", &token_loss, no_gil, "n"_a, "logprobs"_a, "tokens"_a, "objective"_a, "out"_a, "losses"_a,
        "stream"_a);
}
