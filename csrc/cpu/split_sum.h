// A float32 running sum in the memory of a bfloat16 result and as much again: dW over many chunks without a float32 copy.
#pragma once

#include <cstdint>

namespace dapo {

// sum += part, where sum = (high, low) as in RowKernels::add_split.
void add_split(uint16_t* high, uint16_t* low, const uint16_t* bf16_part, int64_t n, int threads);

void round_split(uint16_t* high, const uint16_t* low, int64_t n, int threads);

}  // namespace dapo
