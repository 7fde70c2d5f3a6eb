// Which instruction set serves this processor.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "row_kernels.h"

namespace dapo {
namespace {

struct Candidate {
  const char* name;
  const RowKernels& (*table)();
  bool runs;
};

const RowKernels& choose() {
#if defined(DAPO_X86)
  // Every processor with AVX2 has F16C, whose name gcc before 11 and clang before 18 do not know here.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  const Candidate candidates[] = {
#if defined(DAPO_AVX512BF16)  // where the compiler has it
      {"avx512bf16", row_kernels_avx512bf16, avx512 && __builtin_cpu_supports("avx512bf16")},
#endif
#if defined(DAPO_X86)
      {"avx512", row_kernels_avx512, avx512},
      {"avx2", row_kernels_avx2, avx2},
#endif
      {"portable", row_kernels_portable, true},
  };
  const char* wanted = std::getenv("DAPO_KERNELS_ISA");
  for (const Candidate& candidate : candidates) {
    if (wanted == nullptr ? candidate.runs : wanted == std::string(candidate.name)) {
      if (candidate.runs) return candidate.table();
      throw std::runtime_error(std::string("DAPO_KERNELS_ISA=") + wanted + ": this processor does not run it");
    }
  }
  throw std::runtime_error(std::string("DAPO_KERNELS_ISA=") + wanted +
                           ": unknown or not in this build; one of avx512bf16, avx512, avx2, portable");
}

}  // namespace

const RowKernels& row_kernels() {
  static const RowKernels& chosen = choose();
  return chosen;
}

}  // namespace dapo
