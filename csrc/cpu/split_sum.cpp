#include "split_sum.h"

#include <algorithm>

#include "row_kernels.h"

namespace dapo {
namespace {

constexpr int64_t kPiece = 32768;

template <class Work> void for_pieces(int64_t n, int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > kPiece)
  for (int64_t start = 0; start < n; start += kPiece) work(start, std::min(kPiece, n - start));
}

}  // namespace

void add_split(uint16_t* high, uint16_t* low, const uint16_t* bf16_part, int64_t n, int threads) {
  const auto add = row_kernels().add_split;
  for_pieces(n, threads, [&](int64_t at, int64_t size) { add(high + at, low + at, bf16_part + at, size); });
}

void round_split(uint16_t* high, const uint16_t* low, int64_t n, int threads) {
  const auto round = row_kernels().round_split;
  for_pieces(n, threads, [&](int64_t at, int64_t size) { round(high + at, low + at, size); });
}

}  // namespace dapo
