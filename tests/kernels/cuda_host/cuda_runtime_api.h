// As much of the CUDA runtime as csrc/cuda/launch.cpp asks for, where there is none: a device made of four numbers.
#pragma once

enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
using cudaStream_t = struct CUstream_st*;

struct PretendedDevice {
  int index, values[4];  // by cudaDeviceAttr
  bool cluster_code;
};
// A Hopper with four multiprocessors: fewer rows take the split path.
inline PretendedDevice pretended{0, {4, 9, 0, 232448}, true};

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* index) {
  *index = pretended.index;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = pretended.values[what];
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
