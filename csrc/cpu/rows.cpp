#include "rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "row_kernels.h"

namespace dapo {
namespace {

constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2E = 1.44269504088896340736;

constexpr int64_t kItemSize[3] = {4, 2, 2};

// Below this many rows per thread, threads share the blocks of each row instead of taking whole rows.
constexpr int64_t kFewRowsPerThread = 4;
// How far ahead a single sweep asks for its input, in bytes.
constexpr int64_t kAhead = 4096;

// Logits a thread takes at a time when it takes whole rows.
constexpr int64_t kGrain = 65536;

float base2_scale(float temperature) { return static_cast<float>(kLog2E / temperature); }

// What the last phase needs to know of a row: gradient = p (a + b (x c - top)), plus `onehot` at the target.
struct RowGradient {
  bool zero = true;
  float c = 0.0f, top = 0.0f, a = 0.0f, b = 0.0f;
  int64_t target = 0;
  float at_target = 0.0f;
};

// Working memory of one row in flight.
struct RowState {
  std::vector<SoftmaxPart> parts;
  RowGradient gradient;
};

struct RowView {
  const BlockKernels& kernels;
  char* data;
  int64_t n_cols, itemsize;

  RowView(const Rows& rows, int64_t row)
      : kernels(row_kernels().by_dtype[static_cast<int>(rows.dtype)]),
        data(static_cast<char*>(rows.data) + rows.offset(row) * kItemSize[static_cast<int>(rows.dtype)]),
        n_cols(rows.n_cols),
        itemsize(kItemSize[static_cast<int>(rows.dtype)]) {}

  char* block(int64_t b) const { return data + b * kBlock * itemsize; }
  int64_t block_size(int64_t b) const { return std::min(kBlock, n_cols - b * kBlock); }
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
    }
    return;
  }
  const int64_t grain = std::max<int64_t>(1, std::min(kGrain / std::max<int64_t>(rows.n_cols, 1), n / threads));
#pragma omp parallel num_threads(threads) if (threads > 1 && n * rows.n_cols > kGrain)
  {
    static thread_local RowState state;
    fit(state);
#pragma omp for schedule(dynamic, grain)
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t b = 0; b < blocks; ++b) first(state, row, b);
      middle(state, row);
      for (int64_t b = 0; b < blocks; ++b) last(state, row, b);
    }
  }
}

SoftmaxPart merge_all(const RowState& state, int64_t blocks) {
  SoftmaxPart whole = empty_part();
  for (int64_t b = 0; b < blocks; ++b) whole = merge(whole, state.parts[b]);
  return whole;
}

// In double: one rounding at the end. O(1) per row.
float logprob_of(float x, float c, const SoftmaxPart& whole) {
  const double z = kLn2 * (static_cast<double>(x) * c - whole.top) - std::log(static_cast<double>(whole.sum));
  return static_cast<float>(std::min(z, 0.0));  // rounding must not make a probability greater than 1; NaN stays
}

float entropy_of(const SoftmaxPart& whole) {
  const double h = std::log(static_cast<double>(whole.sum)) - kLn2 * (static_cast<double>(whole.weighted) / whole.sum);
  return static_cast<float>(std::max(h, 0.0));
}

// Gradient of w * logprob + v * entropy (w, v: derivatives of the loss) for a row with this norm:
//   w (onehot - p) / tau - v p (log p + H) / tau,    log p = ln2 (x c - top) - log sum
RowGradient gradient_of(float x_target, int64_t target, float tau, float c, float top, float sum, float w, float v,
                        float entropy) {
  RowGradient g;
  g.zero = w == 0.0f && v == 0.0f;
  g.c = c;
  g.top = top;
  g.target = target;
  const double inv = 1.0 / (static_cast<double>(sum) * tau), log_sum = std::log(static_cast<double>(sum));
  g.a = static_cast<float>(inv * (-w - (v == 0.0f ? 0.0 : v * (entropy - log_sum))));
  g.b = static_cast<float>(inv * -v * kLn2);
  const double log_p = kLn2 * (static_cast<double>(x_target) * c - top) - log_sum;
  const double slope = v == 0.0f ? 0.0 : v * std::exp(log_p) * (std::max(log_p, -200.0) + entropy);
  g.at_target = static_cast<float>((-w * std::expm1(log_p) - slope) / tau);
  return g;
}

void write_zeros(const RowView& row, int64_t b) { std::memset(row.block(b), 0, row.block_size(b) * row.itemsize); }

void set_target(const RowView& out, const RowGradient& g, int64_t b) {
  if (g.target / kBlock == b) out.kernels.set(out.data, g.target, g.at_target);
}

TokenLoss objective_at(const TokenInputs& t, int64_t i, float logprob, float log_ratio, const Objective& o) {
  return token_objective(logprob, log_ratio, t.advantages[i], t.ref_logprobs ? t.ref_logprobs[i] : 0.0f,
                         t.importance_weights ? t.importance_weights[i] : 1.0f, o);
}

void write_dead(const TokenOutputs& out, int64_t row) {
  out.logprobs[row] = 0.0f;
  if (out.norm) out.norm[2 * row] = out.norm[2 * row + 1] = 0.0f;
  if (out.entropy) out.entropy[row] = 0.0f;
  if (out.clip_hit) out.clip_hit[row] = kClipNone;
  if (out.ref_kl) out.ref_kl[row] = 0.0f;
  if (out.idle) out.idle[row] = 1;
}

}  // namespace

Fault find_fault(const Rows& logits, const TokenInputs& tokens) {
  for (int64_t row = 0; row < logits.n_rows; ++row) {
    if (!tokens.live[row]) continue;
    const int64_t target = tokens.target_ids[row];
    if (target < 0 || target >= logits.n_cols) return {InputFault::target_out_of_range, row};
    if (!(tokens.tau(row) > 0.0f)) return {InputFault::temperature_not_positive, row};
  }
  return {InputFault::none, -1};
}

void row_stats(const Rows& logits, const TokenInputs& tokens, const TokenOutputs& out, int threads) {
  const int64_t blocks = n_blocks(logits);
  const bool weighted = out.entropy != nullptr;
  const auto first = [&](RowState& state, int64_t row, int64_t b) {
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    state.parts[b] = x.kernels.stats(x.block(b), x.block_size(b), base2_scale(tokens.tau(row)), weighted, false);
  };
  const auto middle = [&](RowState& state, int64_t row) {
    if (!tokens.live[row]) return write_dead(out, row);
    const RowView x(logits, row);
    const SoftmaxPart whole = merge_all(state, blocks);
    out.logprobs[row] = logprob_of(x.kernels.get(x.data, tokens.target_ids[row]), base2_scale(tokens.tau(row)), whole);
    out.norm[2 * row] = whole.top;
    out.norm[2 * row + 1] = whole.sum;
    if (out.entropy) out.entropy[row] = entropy_of(whole);
  };
  for_rows(logits, threads, first, middle, [](RowState&, int64_t, int64_t) {});
}

void row_grad(const Rows& logits, const Rows& grad, const TokenInputs& tokens, const float* norm, const float* entropy,
              const float* d_logprobs, const float* d_entropy, int threads) {
  const auto nothing = [](RowState&, int64_t, int64_t) {};
  const auto middle = [&](RowState& state, int64_t row) {
    state.gradient = RowGradient();
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    const int64_t target = tokens.target_ids[row];
    const float tau = tokens.tau(row);
    state.gradient = gradient_of(x.kernels.get(x.data, target), target, tau, base2_scale(tau), norm[2 * row],
                                 norm[2 * row + 1], d_logprobs[row], d_entropy ? d_entropy[row] : 0.0f,
                                 d_entropy ? entropy[row] : 0.0f);
  };
  const auto last = [&](RowState& state, int64_t row, int64_t b) {
    const RowView x(logits, row), out(grad, row);
    const RowGradient& g = state.gradient;
    if (g.zero) return write_zeros(out, b);
    x.kernels.grad(x.block(b), out.block(b), x.block_size(b), g.c, g.top, g.a, g.b, x.block(b) + kAhead);
    set_target(out, g, b);
  };
  for_rows(logits, threads, nothing, middle, last);
}

double row_loss(const Rows& logits, const TokenInputs& tokens, const Objective& objective, float entropy_coef,
                const TokenOutputs& out, int threads) {
  const int64_t blocks = n_blocks(logits);
  // float32 has room for its own exponentials: kept over the logits, the second sweep only scales them. 16-bit rows
  // compute them again: a float32 copy of the row in the L2 cache took longer (3.3 ms against 2.7 ms for 256 rows of
  // 49152). The entropy's gradient needs the logits themselves.
  const bool keep = logits.dtype == Dtype::f32 && entropy_coef == 0.0f;
  std::vector<double> losses(logits.n_rows, 0.0);
  std::vector<float> x_target(logits.n_rows);  // read before the exponentials overwrite it

  for (int64_t row = 0; row < logits.n_rows; ++row) {
    if (!tokens.live[row]) continue;
    const RowView x(logits, row);
    x_target[row] = x.kernels.get(x.data, tokens.target_ids[row]);
  }
  const auto first = [&](RowState& state, int64_t row, int64_t b) {
    if (!tokens.live[row]) return;
    const RowView x(logits, row);
    state.parts[b] =
        x.kernels.stats(x.block(b), x.block_size(b), base2_scale(tokens.tau(row)), out.entropy != nullptr, keep);
  };
  const auto middle = [&](RowState& state, int64_t row) {
    state.gradient = RowGradient();
    if (!tokens.live[row]) return write_dead(out, row);
    const SoftmaxPart whole = merge_all(state, blocks);
    const float tau = tokens.tau(row), c = base2_scale(tau), weight = tokens.weights[row];
    const float logprob = logprob_of(x_target[row], c, whole);
    const float entropy = out.entropy ? entropy_of(whole) : 0.0f;
    const float log_ratio = tokens.old_logprobs ? logprob - tokens.old_logprobs[row] : 0.0f;
    const TokenLoss loss = objective_at(tokens, row, logprob, log_ratio, objective);
    if (weight != 0.0f) {  // a token that was not selected has no say, and its loss may overflow
      losses[row] = weight * (loss.value - (entropy_coef == 0.0f ? 0.0f : entropy_coef * entropy));
      state.gradient = gradient_of(x_target[row], tokens.target_ids[row], tau, c, whole.top, whole.sum,
                                   weight * (loss.d_logprob + loss.d_log_ratio), -entropy_coef * weight, entropy);
    }
    out.logprobs[row] = logprob;
    if (out.entropy) out.entropy[row] = entropy;
    out.clip_hit[row] = loss.hit;
    if (out.ref_kl) out.ref_kl[row] = loss.kl;
    out.idle[row] = state.gradient.zero;
  };
  const auto last = [&](RowState& state, int64_t row, int64_t b) {
    const RowView x(logits, row);
    const RowGradient& g = state.gradient;
    if (g.zero) return write_zeros(x, b);
    const char* ahead = RowView(logits, std::min(row + 1, logits.n_rows - 1)).block(b);
    if (keep) {
      x.kernels.scale(x.block(b), x.block_size(b), g.a * exp2f(state.parts[b].top - g.top), ahead);
    } else {
      x.kernels.grad(x.block(b), x.block(b), x.block_size(b), g.c, g.top, g.a, g.b, ahead);
    }
    set_target(x, g, b);
  };
  for_rows(logits, threads, first, middle, last);

  double total = 0.0;
  for (double loss : losses) total += loss;  // in row order: the same bits for any number of threads
  return total;
}

double token_loss(int64_t n, const float* logprobs, const TokenInputs& tokens, const Objective& objective,
                  const TokenOutputs& out) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    TokenLoss loss{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
    float weight = 0.0f;
    if (tokens.live[i]) {
      weight = tokens.weights[i];
      loss = objective_at(tokens, i, logprobs[i], tokens.log_ratio ? tokens.log_ratio[i] : 0.0f, objective);
    }
    if (weight == 0.0f) loss.value = loss.d_logprob = loss.d_log_ratio = 0.0f;  // 0 * inf otherwise
    total += static_cast<double>(weight) * loss.value;
    out.d_logprobs[i] = weight * loss.d_logprob;
    out.d_log_ratio[i] = weight * loss.d_log_ratio;
    out.clip_hit[i] = loss.hit;
    if (out.ref_kl) out.ref_kl[i] = loss.kl;
  }
  return total;
}

}  // namespace dapo
