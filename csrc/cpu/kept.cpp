#include "kept.h"

#include <atomic>
#include <vector>

namespace dapo {
namespace {

constexpr int64_t kGrainRows = 16;

// -inf of each dtype: what `kept` holds for a token of another part.
constexpr uint32_t kLow32 = 0xff800000u;
constexpr uint16_t kLow16[3] = {0, 0xff80u, 0xfc00u};

template <class T> T* row_of(const Rows& rows, int64_t row) { return static_cast<T*>(rows.data) + rows.offset(row); }

template <class Bits>
bool gather(const Rows& logits, const TokenInputs& tokens, const KeptIds& list, bool partial, const Rows& kept,
            int64_t* places, Bits low, int threads) {
  std::atomic<bool> good{true};
#pragma omp parallel for schedule(dynamic, kGrainRows) num_threads(threads)
  for (int64_t row = 0; row < logits.n_rows; ++row) {
    places[row] = -1;
    if (!tokens.live[row]) continue;
    bool all_here = true;
    const Bits* x = row_of<const Bits>(logits, row);
    Bits* to = static_cast<Bits*>(kept.data);
    const int64_t target = tokens.target_ids[row];
    for (int64_t i = list.starts[row]; i < list.starts[row + 1]; ++i) {
      const int64_t id = list.ids[i];
      const bool here = id >= 0 && id < logits.n_cols;
      to[i] = here ? x[id] : low;
      if (here && id == target) places[row] = i - list.starts[row];
      all_here &= here;
    }
    const int64_t first = list.starts[row];
    const bool alone = !partial && list.starts[row + 1] == first + 1;
    // It has probability 1 whatever its logit, if that is finite (the shifts drop the sign): at 0 nothing is rounded.
    if (alone && static_cast<Bits>(to[first] << 1) < static_cast<Bits>(low << 1)) to[first] = 0;
    if (!all_here || places[row] < 0 || !tokens.has_temperature(row)) good.store(false, std::memory_order_relaxed);
  }
  return good;
}

template <class Bits>
void scatter(const Rows& kept, const TokenInputs& tokens, const KeptIds& list, const Rows& out, int threads) {
#pragma omp parallel for schedule(dynamic, kGrainRows) num_threads(threads)
  for (int64_t row = 0; row < out.n_rows; ++row) {
    if (!tokens.live[row]) continue;
    const Bits* from = static_cast<const Bits*>(kept.data);
    Bits* x = row_of<Bits>(out, row);
    for (int64_t i = list.starts[row]; i < list.starts[row + 1]; ++i) {
      const int64_t id = list.ids[i];
      if (id >= 0 && id < out.n_cols) x[id] = from[i];
    }
  }
}

// The numbers that were seen since `clear`: open addressing, at most half full.
class Seen {
 public:
  void clear(int64_t n) {
    size_t size = 16;
    while (size < 2 * static_cast<size_t>(n)) size *= 2;
    slots_.assign(size, -1);
  }

  bool insert(int32_t x) {
    const size_t mask = slots_.size() - 1;
    size_t at = (static_cast<uint32_t>(x) * 2654435761u) & mask;
    while (slots_[at] != -1) {
      if (slots_[at] == x) return false;
      at = (at + 1) & mask;
    }
    slots_[at] = x;
    return true;
  }

 private:
  std::vector<int32_t> slots_;
};

int64_t first_repeated(const int64_t* ids, int64_t from, int64_t to, Seen& seen) {
  int64_t i = from + 1;
  while (i < to && ids[i - 1] < ids[i]) ++i;
  if (i >= to) return -1;  // in order, as lists of kept tokens mostly are
  seen.clear(to - from);
  for (i = from; i < to; ++i) {
    if (ids[i] >> 31 == 0 && !seen.insert(static_cast<int32_t>(ids[i]))) return i;
  }
  return -1;
}

}  // namespace

bool gather_kept(const Rows& logits, const TokenInputs& tokens, const KeptIds& list, bool partial, const Rows& kept,
                 int64_t* places, int threads) {
  if (logits.dtype == Dtype::f32) return gather<uint32_t>(logits, tokens, list, partial, kept, places, kLow32, threads);
  const uint16_t low = kLow16[static_cast<int>(logits.dtype)];
  return gather<uint16_t>(logits, tokens, list, partial, kept, places, low, threads);
}

void scatter_kept(const Rows& kept, const TokenInputs& tokens, const KeptIds& list, const Rows& out, int threads) {
  if (out.dtype == Dtype::f32) return scatter<uint32_t>(kept, tokens, list, out, threads);
  scatter<uint16_t>(kept, tokens, list, out, threads);
}

int64_t find_repeated(const KeptIds& list, const uint8_t* live, int64_t n_rows, int threads) {
  std::atomic<int64_t> first{-1};
#pragma omp parallel num_threads(threads)
  {
    Seen seen;
#pragma omp for schedule(dynamic, kGrainRows)
    for (int64_t row = 0; row < n_rows; ++row) {
      const int64_t at = live[row] ? first_repeated(list.ids, list.starts[row], list.starts[row + 1], seen) : -1;
      for (int64_t now = first; at >= 0 && (now < 0 || at < now) && !first.compare_exchange_weak(now, at);) {
      }
    }
  }
  return first;
}

}  // namespace dapo
