// CUDA errors as exceptions that say where: file, line, the call and CUDA's own text.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace dapo {

inline void check_cuda(cudaError_t status, const char* file, int line, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next, innocent call would report it again
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                           cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

}  // namespace dapo

#define DAPO_CHECK_CUDA(call) ::dapo::check_cuda((call), __FILE__, __LINE__, #call)
