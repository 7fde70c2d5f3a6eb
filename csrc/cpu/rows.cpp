#include "rows.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../row_math.h"
#include "row_kernels.h"

namespace dapo {
namespace {

constexpr int64_t kItemSize[3] = {4, 2, 2};

// Below this many rows per thread, threads share the blocks of each row instead of taking whole rows.
constexpr int64_t kFewRowsPerThread = 4;
// How far ahead a single sweep asks for its input, in bytes.
constexpr int64_t kAhead = 4096;

// A thread takes this many logits at a time, and at least so many rows: neighbours in memory (two threads that
// alternate between rows took 17.6 ms instead of 14.8 for 2048 rows of 49152 floats). It takes the next ones one row
// early, because a row is fetched while the one before is worked on.
constexpr int64_t kGrain = 65536;
constexpr int64_t kGrainRows = 16;

// Logits of this many bytes will have left the caches before anybody reads their gradient.
constexpr int64_t kLargerThanCaches = 32 << 20;

// Working memory of one row in flight.
struct RowState {
  int64_t next = -1;  // the row this thread takes next, or -1
  std::vector<SoftmaxPart> parts;
  float c = 0.0f, max = 0.0f;
  float x_target = 0.0f;  // read before the exponentials overwrite it
  RowGradient gradient = zero_gradient();
};

struct RowView {
  const BlockKernels& kernels;
  char* data;
  int64_t n_cols, itemsize;

  RowView(const Rows& rows, int64_t row)
      : kernels(row_kernels().by_dtype[static_cast<int>(rows.dtype)]),
        data(static_cast<char*>(rows.data) +
             (rows.starts ? rows.starts[row] : rows.offset(row)) * kItemSize[static_cast<int>(rows.dtype)]),
        n_cols(rows.starts ? rows.starts[row + 1] - rows.starts[row] : rows.n_cols),
        itemsize(kItemSize[static_cast<int>(rows.dtype)]) {}

  char* block(int64_t b) const { return data + b * kBlock * itemsize; }
  int64_t block_size(int64_t b) const { return std::max<int64_t>(0, std::min(kBlock, n_cols - b * kBlock)); }
};

int64_t n_blocks(const Rows& rows) { return (rows.n_cols + kBlock - 1) / kBlock; }

// Runs first(row, block), middle(row), last(row, block) for every row: whole rows per thread, or, when rows are few,
// all blocks of all rows in three sweeps. The results are the same: blocks are merged in order in `middle`.
template <class First, class Middle, class Last>
void for_rows(const Rows& rows, int threads, First first, Middle middle, Last last) {
  const int64_t n = rows.n_rows, blocks = n_blocks(rows);
  row_kernels();  // may throw, which it must not do for the first time among the threads
  const auto fit = [&](RowState& state) {
    if (state.parts.size() < static_cast<size_t>(blocks)) state.parts.resize(blocks);
  };
  if (threads > 1 && n < kFewRowsPerThread * threads && blocks > 1) {
    std::vector<RowState> states(n);
    for (RowState& state : states) fit(state);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
      for (int64_t row = 0; row < n; ++row)
        for (int64_t b = 0; b < blocks; ++b) first(states[row], row, b);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < n; ++row) middle(states[row], row);
#pragma omp for collapse(2) schedule(static)
      for (int64_t row = 0; row < n; ++row)
        for (int64_t b = 0; b < blocks; ++b) last(states[row], row, b);
      row_kernels().stream_fence();
    }
    return;
  }
  const int64_t wanted = std::max(kGrainRows, kGrain / std::max<int64_t>(rows.n_cols, 1));
  const int64_t grain = std::max<int64_t>(1, std::min(wanted, n / threads));
  std::atomic<int64_t> taken{0};
#pragma omp parallel num_threads(threads) if (threads > 1 && n * rows.n_cols > kGrain)
  {
    // The last sweep of a row takes turns with the first of the next one: so memory is read and written all the time,
    // and not read during the one and written during the other.
    static thread_local RowState states[2];
    RowState *state = &states[0], *before = &states[1];
    fit(*state);
    fit(*before);
    int64_t done = -1;  // the row of `before`
    for (int64_t next, row = taken.fetch_add(grain); row < n; row = next) {
      next = (row + 1) % grain != 0 ? row + 1 : taken.fetch_add(grain);
      state->next = next < n ? next : -1;
      for (int64_t b = 0; b < blocks; ++b) {
        if (done >= 0) last(*before, done, b);
        first(*state, row, b);
      }
      middle(*state, row);
      done = row;
      std::swap(state, before);
    }
    for (int64_t b = 0; b < blocks && done >= 0; ++b) last(*before, done, b);
    row_kernels().stream_fence();
  }
}

// What a first sweep fetches into the L2 cache while it works on a block: the same block of the next row, so that both
// sweeps of a row run from there; without a next row, the next block.
const void* ahead_of(const Rows& rows, const RowState& state, int64_t row, int64_t b) {
  return state.next >= 0 ? RowView(rows, state.next).block(b) : RowView(rows, row).block(b + 1);
}

// All parts are lifted to one maximum: merged one after the other, each exponential would wait for the one before.
SoftmaxPart merge_all(const RowState& state, int64_t blocks, float c) {
  SoftmaxPart whole = empty_part();
  for (int64_t b = 0; b < blocks; ++b) whole.max = std::max(whole.max, state.parts[b].max);
  for (int64_t b = 0; b < blocks; ++b) {
    const SoftmaxPart part = lift(state.parts[b], whole.max, c);
    whole.sum += part.sum;
    whole.weighted += part.weighted;
  }
  return whole;
}

bool leaves_caches(const Rows& rows) {
  return rows.n_rows * rows.n_cols * kItemSize[static_cast<int>(rows.dtype)] >= kLargerThanCaches;
}

// Zeros for the gradient of a dead row; past the caches where the whole is larger than they are.
void write_zeros(const Rows& rows, const RowView& row, int64_t b) {
  const int64_t bytes = row.block_size(b) * row.itemsize;
  if (leaves_caches(rows)) {
    row_kernels().stream_zeros(row.block(b), bytes);
  } else {
    std::memset(row.block(b), 0, bytes);
  }
}

// In row order: the same bits for any number of threads.
double sum_in_order(const std::vector<double>& losses) {
  double total = 0.0;
  for (double loss : losses) total += loss;
  return total;
}

void set_target(const RowView& out, const RowGradient& g, int64_t b) {
  if (g.target >= 0 && g.target / kBlock == b) out.kernels.set(out.data, g.target, g.at_target);
}

// 0 where the row does not hold it.
float target_logit(const RowView& x, int64_t target) { return target < 0 ? 0.0f : x.kernels.get(x.data, target); }

}  // namespace

Fault find_fault(const Rows& logits, const TokenInputs& tokens) {
  for (int64_t row = 0; row < logits.n_rows; ++row) {
    if (!tokens.live[row]) continue;
    const int64_t target = tokens.target_ids[row];
    if (target < 0 || target >= logits.n_cols) return {InputFault::target_out_of_range, row};
    if (!tokens.has_temperature(row)) return {InputFault::bad_temperature, row};
  }
  return {InputFault::none, -1};
}

// Runs middle(row, the target's logit, statistics of the row) for every live row: one sweep, nothing written to the logits.
template <class Middle>
static void for_stats(const Rows& logits, const TokenInputs& tokens, const TokenOutputs& out, int threads, Middle middle) {
  const auto first = [&](RowState& state, int64_t row, int64_t b) {
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    state.parts[b] = x.kernels.stats(x.block(b), x.block_size(b), base2_scale(tokens.tau(row)), out.entropy != nullptr,
                                     false, ahead_of(logits, state, row, b));
  };
  const auto finish = [&](RowState& state, int64_t row) {
    if (!tokens.live[row]) return write_dead(out, row);
    const RowView x(logits, row);
    const SoftmaxPart whole = merge_all(state, n_blocks(logits), base2_scale(tokens.tau(row)));
    middle(row, target_logit(x, tokens.target_ids[row]), whole);
  };
  for_rows(logits, threads, first, finish, [](RowState&, int64_t, int64_t) {});
}

void row_stats(const Rows& logits, const TokenInputs& tokens, const TokenOutputs& out, int threads) {
  for_stats(logits, tokens, out, threads, [&](int64_t row, float x_target, const SoftmaxPart& whole) {
    write_stats(out, row, x_target, base2_scale(tokens.tau(row)), whole);
  });
}

double row_slopes(const Rows& logits, const TokenInputs& tokens, const Objective& objective, float entropy_coef,
                  const TokenOutputs& out, int threads) {
  std::vector<double> losses(logits.n_rows, 0.0);
  for_stats(logits, tokens, out, threads, [&](int64_t row, float x_target, const SoftmaxPart& whole) {
    const float tau = tokens.tau(row);
    const TokenValues token = token_values(tokens, row);
    const RowLoss result = finish_loss(token, x_target, tau, base2_scale(tau), objective, entropy_coef,
                                       out.entropy != nullptr, whole);
    write_stats(out, row, x_target, base2_scale(tau), whole);
    write_loss(out, row, result);
    const float slope = result.loss.d_logprob + result.loss.d_log_ratio;
    out.d_logprobs[row] = token.weight == 0.0f ? 0.0f : token.weight * slope;
    losses[row] = result.weighted;
  });
  return sum_in_order(losses);
}

void row_grad(const Rows& logits, const Rows& grad, const TokenInputs& tokens, const float* norm, const float* entropy,
              const float* d_logprobs, const float* d_entropy, bool zeroed, int threads) {
  const bool past_caches = grad.data != logits.data && leaves_caches(grad);
  const auto nothing = [](RowState&, int64_t, int64_t) {};
  const auto middle = [&](RowState& state, int64_t row) {
    state.gradient = zero_gradient();
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    const int64_t target = tokens.target_ids[row];
    const float tau = tokens.tau(row);
    state.gradient = gradient_of(target_logit(x, target), target, tau, base2_scale(tau), norm[2 * row],
                                 norm[2 * row + 1], d_logprobs[row], d_entropy ? d_entropy[row] : 0.0f,
                                 d_entropy ? entropy[row] : 0.0f);
  };
  const auto last = [&](RowState& state, int64_t row, int64_t b) {
    const RowView x(logits, row), out(grad, row);
    const RowGradient& g = state.gradient;
    if (g.zero) return zeroed ? void() : write_zeros(grad, out, b);
    x.kernels.grad(x.block(b), out.block(b), x.block_size(b), g.base2, g.a, g.b, x.block(b) + kAhead,
                   past_caches);
    set_target(out, g, b);
  };
  for_rows(logits, threads, nothing, middle, last);
}

double row_loss(const Rows& logits, const TokenInputs& tokens, const Objective& objective, float entropy_coef,
                const TokenOutputs& out, int threads) {
  const int64_t blocks = n_blocks(logits);
  // The exponentials are kept over the logits, the second sweep only scales them; computed again they took as long as the
  // first time, in a float32 copy of a bfloat16 row longer still. The entropy's gradient needs the logits themselves.
  const bool keep = logits.dtype != Dtype::f16 && entropy_coef == 0.0f;
  std::vector<double> losses(logits.n_rows, 0.0);

  const auto first = [&](RowState& state, int64_t row, int64_t b) {
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    const int64_t target = tokens.target_ids[row];
    if (target / kBlock == b) state.x_target = x.kernels.get(x.data, target);
    state.parts[b] = x.kernels.stats(x.block(b), x.block_size(b), base2_scale(tokens.tau(row)), out.entropy != nullptr,
                                     keep, ahead_of(logits, state, row, b));
  };
  const auto middle = [&](RowState& state, int64_t row) {
    state.gradient = zero_gradient();
    if (!tokens.live[row]) return write_dead(out, row);
    const float tau = tokens.tau(row), c = base2_scale(tau);
    const SoftmaxPart whole = merge_all(state, blocks, c);
    const RowLoss result = finish_loss(token_values(tokens, row), state.x_target, tau, c, objective, entropy_coef,
                                       out.entropy != nullptr, whole);
    state.c = c;
    state.max = whole.max;
    write_loss(out, row, result);
    losses[row] = result.weighted;
    state.gradient = result.gradient;
  };
  const auto last = [&](RowState& state, int64_t row, int64_t b) {
    const RowView x(logits, row);
    const RowGradient& g = state.gradient;
    if (g.zero) return write_zeros(logits, x, b);
    if (keep) {
      const float shift = shift_of(state.parts[b].max, state.max, state.c);
      x.kernels.scale(x.block(b), x.block_size(b), g.a * exp2f(shift));
    } else {
      x.kernels.grad(x.block(b), x.block(b), x.block_size(b), g.base2, g.a, g.b, x.block(b), false);
    }
    set_target(x, g, b);
  };
  for_rows(logits, threads, first, middle, last);

  return sum_in_order(losses);
}

double token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                  const TokenOutputs& out) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += write_token_loss(i, logprobs, tokens, objective, out);
  return total;
}

}  // namespace dapo
