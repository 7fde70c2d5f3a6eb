// What only the device has, for every kernel: warps.
#pragma once

#include "rows.h"

namespace dapo {
namespace cuda {

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

}  // namespace cuda
}  // namespace dapo
