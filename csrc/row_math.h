// What one row needs once its softmax statistics are known: O(1) per row, for the CPU and for CUDA.
//
// In a type wider than float: one rounding at the end, and logits at 1e4 keep their digits. `Wide` is double, or on a
// GPU the two floats of cuda/double_float.h.
#pragma once

#include <cmath>

#include "online_softmax.h"
#include "params.h"

namespace dapo {

constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2E = 1.44269504088896340736;

template <class Wide> DAPO_HOST_DEVICE Wide log_of(float x) { return std::log(static_cast<Wide>(x)); }
template <class Wide> DAPO_HOST_DEVICE Wide exp_of(Wide x) { return std::exp(x); }
template <class Wide> DAPO_HOST_DEVICE Wide expm1_of(Wide x) { return std::expm1(x); }

// c: logits x become base-2 exponents x c.
template <class Wide = double> DAPO_HOST_DEVICE float base2_scale(float temperature) {
  return static_cast<float>(static_cast<Wide>(kLog2E) / temperature);
}

// ln p of a logit in a row with this maximum and this sum.
template <class Wide> DAPO_HOST_DEVICE Wide log_p_of(float x, float c, float max, float sum) {
  const float top = top_of(max, c);
  const Wide ln2 = static_cast<Wide>(kLn2);
  // Far away neither the difference of two floats nor a base-2 exponent need be a float where ln p is.
  const Wide z = is_far(top) ? (static_cast<Wide>(0.5f * x) - 0.5f * max) * (ln2 * (2.0f * c))
                             : ln2 * (static_cast<Wide>(x) * c - top);
  return z - log_of<Wide>(sum);
}

template <class Wide = double> DAPO_HOST_DEVICE float logprob_of(float x, float c, const SoftmaxPart& whole) {
  const float z = static_cast<float>(log_p_of<Wide>(x, c, whole.max, whole.sum));
  return 0.0f < z ? 0.0f : z;  // rounding must not make a probability greater than 1; NaN stays
}

template <class Wide = double> DAPO_HOST_DEVICE float entropy_of(const SoftmaxPart& whole) {
  const Wide mean = static_cast<Wide>(whole.weighted) / whole.sum;
  const float h = static_cast<float>(log_of<Wide>(whole.sum) - static_cast<Wide>(kLn2) * mean);
  return h < 0.0f ? 0.0f : h;
}

// A gradient row: p (a + b y) with p = 2^y, y = x scale - top, but `at_target` at the target; or all zeros.
struct RowGradient {
  int64_t target;
  Base2 base2;
  float a, b, at_target;
  bool zero;
};

DAPO_HOST_DEVICE RowGradient zero_gradient() { return {0, {0.0f, 0.0f}, 0.0f, 0.0f, 0.0f, true}; }

// Gradient of w * logprob + v * entropy (w, v: derivatives of the loss) for a row with this norm:
//   w (onehot - p) / tau - v p (log p + H) / tau,    log p = ln2 (x c - top) - log sum
template <class Wide = double>
DAPO_HOST_DEVICE RowGradient gradient_of(float x_target, int64_t target, float tau, float c, float max, float sum,
                                         float w, float v, float entropy) {
  RowGradient g = zero_gradient();
  g.zero = w == 0.0f && v == 0.0f;
  g.base2 = base2(max, c);
  g.target = target;
  const Wide zero = 0.0f, inv = static_cast<Wide>(1.0f) / (static_cast<Wide>(sum) * tau);
  const Wide lift = v == 0.0f ? zero : static_cast<Wide>(v) * (static_cast<Wide>(entropy) - log_of<Wide>(sum));
  g.a = static_cast<float>(inv * (static_cast<Wide>(-w) - lift));
  g.b = static_cast<float>(inv * -v * static_cast<Wide>(kLn2));
  const Wide log_p = log_p_of<Wide>(x_target, c, max, sum), least = -200.0f;
  const Wide slope =
      v == 0.0f ? zero : static_cast<Wide>(v) * exp_of(log_p) * ((log_p < -200.0f ? least : log_p) + entropy);
  g.at_target = static_cast<float>((static_cast<Wide>(-w) * expm1_of(log_p) - slope) / tau);
  return g;
}

// Inputs of one token, fetched.
struct TokenValues {
  int64_t target;
  float weight, advantage, old_logprob, log_ratio, ref_logprob, importance_weight;
  bool on_policy;
};

DAPO_HOST_DEVICE TokenValues token_values(const TokenInputs& t, int64_t i) {
  return {t.target_ids ? t.target_ids[i] : 0,
          t.weights[i],
          t.advantages[i],
          t.old_logprobs ? t.old_logprobs[i] : 0.0f,
          t.log_ratio ? t.log_ratio[i] : 0.0f,
          t.ref_logprobs ? t.ref_logprobs[i] : 0.0f,
          t.importance_weights ? t.importance_weights[i] : 1.0f,
          t.old_logprobs == nullptr};
}

// Results of one live row, and the gradient row still to be written.
struct RowLoss {
  float logprob, entropy;
  TokenLoss loss;
  double weighted;  // the row's share of the scalar loss
  RowGradient gradient;
};

template <class Wide = double>
DAPO_HOST_DEVICE RowLoss finish_loss(const TokenValues& t, float x_target, float tau, float c, const Objective& o,
                                     float entropy_coef, bool has_entropy, const SoftmaxPart& whole) {
  const float logprob = logprob_of<Wide>(x_target, c, whole);
  const float entropy = has_entropy ? entropy_of<Wide>(whole) : 0.0f;
  const float log_ratio = t.on_policy ? 0.0f : logprob - t.old_logprob;
  RowLoss r{logprob, entropy, token_objective(logprob, log_ratio, t.advantage, t.ref_logprob, t.importance_weight, o),
            0.0, zero_gradient()};
  if (t.weight != 0.0f) {  // a token that was not selected has no say, and its loss may overflow
    r.weighted = t.weight * (r.loss.value - (entropy_coef == 0.0f ? 0.0f : entropy_coef * entropy));
    r.gradient = gradient_of<Wide>(x_target, t.target, tau, c, whole.max, whole.sum,
                                   t.weight * (r.loss.d_logprob + r.loss.d_log_ratio), -entropy_coef * t.weight,
                                   entropy);
  }
  return r;
}

DAPO_HOST_DEVICE void write_loss(const TokenOutputs& out, int64_t row, const RowLoss& r) {
  out.logprobs[row] = r.logprob;
  if (out.entropy) out.entropy[row] = r.entropy;
  out.clip_hit[row] = r.loss.hit;
  if (out.ref_kl) out.ref_kl[row] = r.loss.kl;
  if (out.idle) out.idle[row] = r.gradient.zero;
}

template <class Wide = double>
DAPO_HOST_DEVICE void write_stats(const TokenOutputs& out, int64_t row, float x_target, float c,
                                  const SoftmaxPart& whole) {
  out.logprobs[row] = logprob_of<Wide>(x_target, c, whole);
  out.norm[2 * row] = whole.max;
  out.norm[2 * row + 1] = whole.sum;
  if (out.entropy) out.entropy[row] = entropy_of<Wide>(whole);
}

DAPO_HOST_DEVICE void write_dead(const TokenOutputs& out, int64_t row) {
  out.logprobs[row] = 0.0f;
  if (out.norm) out.norm[2 * row] = out.norm[2 * row + 1] = 0.0f;
  if (out.entropy) out.entropy[row] = 0.0f;
  if (out.clip_hit) out.clip_hit[row] = kClipNone;
  if (out.ref_kl) out.ref_kl[row] = 0.0f;
  if (out.idle) out.idle[row] = 1;
  if (out.d_logprobs) out.d_logprobs[row] = 0.0f;
}

// One token of the elementwise objective; returns its share of the loss.
DAPO_HOST_DEVICE double write_token_loss(int64_t i, const float* logprobs, const TokenInputs& tokens,
                                         const Objective& objective, const TokenOutputs& out) {
  TokenLoss loss{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  float weight = 0.0f;
  if (tokens.live[i]) {
    const TokenValues t = token_values(tokens, i);
    weight = t.weight;
    loss = token_objective(logprobs[i], t.log_ratio, t.advantage, t.ref_logprob, t.importance_weight, objective);
  }
  if (weight == 0.0f) loss.value = loss.d_logprob = loss.d_log_ratio = 0.0f;  // 0 * inf otherwise
  out.d_logprobs[i] = weight * loss.d_logprob;
  out.d_log_ratio[i] = weight * loss.d_log_ratio;
  out.clip_hit[i] = loss.hit;
  if (out.ref_kl) out.ref_kl[i] = loss.kl;
  return static_cast<double>(weight) * loss.value;
}

}  // namespace dapo
