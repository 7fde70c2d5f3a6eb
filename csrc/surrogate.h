// The per-token objective, for C++ and CUDA: the twin of dapo_kernels/objectives/surrogate.py.
//
//   L(l, d) = u * policy(l, d, A) + kl_coef * kl(l_ref - l) [* exp(d)]
//
// l log-prob, d log-ratio, A advantage, u importance weight. Value, derivatives and which clip was hit, together.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define DAPO_HOST_DEVICE __host__ __device__ inline
#else
#define DAPO_HOST_DEVICE inline
#endif

namespace dapo {

// Indices of objectives/table.py: SURROGATES and objectives.KL_ESTIMATORS.
enum class Surrogate : int32_t { clip = 0, cispo = 1, reinforce = 2, sapo = 3, dppo_tv = 4, dppo_kl = 5, up = 6 };
enum class KlEstimator : int32_t { k1 = 0, k2 = 1, k3 = 2 };
enum ClipHit : int8_t { kClipNone = 0, kClipLow = 1, kClipHigh = 2, kClipDual = 3 };

struct Objective {
  Surrogate surrogate;
  KlEstimator kl_estimator;
  float ratio_min, ratio_max;  // 1 - clip_low, 1 + clip_high
  float dual_clip;             // inf when off
  float tau_positive, tau_negative;
  float kl_coef;
  bool kl_through_ratio;
};

struct TokenLoss {
  float value, d_logprob, d_log_ratio, kl;
  ClipHit hit;
};

DAPO_HOST_DEVICE float clamp_ratio(float ratio, const Objective& o) {
  return ratio < o.ratio_min ? o.ratio_min : (ratio > o.ratio_max ? o.ratio_max : ratio);
}

// -min(rho A, clip(rho) A), for A < 0 at most -dual_clip A.
DAPO_HOST_DEVICE TokenLoss clip_term(float log_ratio, float advantage, const Objective& o) {
  TokenLoss out{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  if (advantage == 0.0f) return out;  // a ratio that overflows must not become inf * 0
  const float ratio = expf(log_ratio);
  const float unclipped = -ratio * advantage;
  const float bounded = clamp_ratio(ratio, o);
  const float clipped = -bounded * advantage;
  // Ties take the first branch: at rho = 1 the gradient is -A. A NaN takes it too, and so stays visible.
  const bool first = !(unclipped < clipped);
  out.value = first ? unclipped : clipped;
  out.d_log_ratio = first ? unclipped : 0.0f;
  if (!first) out.hit = advantage < 0.0f ? kClipLow : kClipHigh;
  const float bound = -o.dual_clip * advantage;
  if (advantage < 0.0f && out.value > bound) {
    out.value = bound;
    out.d_log_ratio = 0.0f;
    out.hit = kClipDual;
  }
  return out;
}

// -sg[clip(rho)] A l
DAPO_HOST_DEVICE TokenLoss cispo_term(float logprob, float log_ratio, float advantage, const Objective& o) {
  TokenLoss out{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  if (advantage == 0.0f) return out;
  const float ratio = expf(log_ratio);
  out.d_logprob = -clamp_ratio(ratio, o) * advantage;
  out.value = out.d_logprob == 0.0f ? 0.0f : out.d_logprob * logprob;  // a log-prob of -inf: not 0 * -inf
  out.hit = ratio < o.ratio_min ? kClipLow : (ratio > o.ratio_max ? kClipHigh : kClipNone);
  return out;
}

// -A sigma(tau (rho - 1)) 4 / tau
DAPO_HOST_DEVICE TokenLoss sapo_term(float log_ratio, float advantage, const Objective& o) {
  TokenLoss out{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  if (advantage == 0.0f) return out;
  const float ratio = expf(log_ratio), tau = advantage > 0.0f ? o.tau_positive : o.tau_negative;
  const float gate = 1.0f / (1.0f + expf(-tau * (ratio - 1.0f)));
  const float closing = 1.0f / (1.0f + expf(tau * (ratio - 1.0f)));  // 1 - gate, without the cancellation
  out.value = -4.0f * advantage * gate / tau;
  out.d_log_ratio = closing == 0.0f ? 0.0f : -4.0f * advantage * gate * closing * ratio;
  return out;
}

// -sg[min(rho, dual_clip)] A l, and nothing where the probability is too far above or below the old one for A's sign:
// by the total variation, or by the KL divergence, between the token and all others.
DAPO_HOST_DEVICE TokenLoss dppo_term(float logprob, float log_ratio, float advantage, const Objective& o) {
  TokenLoss out{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  if (advantage == 0.0f) return out;
  const float old = logprob - log_ratio, low = 1.0f - o.ratio_min, high = o.ratio_max - 1.0f;
  bool above, below;
  if (o.surrogate == Surrogate::dppo_tv) {
    const float shift = expf(logprob) - expf(old);
    above = shift > high;
    below = -shift > low;
  } else {
    // Float32 log-probs near 0 round to it. Without the 1e-8 the other tokens' part would then have no end.
    const float rest = fmaxf(-expm1f(logprob), 0.0f), old_rest = fmaxf(-expm1f(old), 0.0f);
    const float kl = old_rest * logf((old_rest + 1e-8f) / (rest + 1e-8f)) - expf(old) * log_ratio;
    above = log_ratio > 0.0f && kl > high;
    below = log_ratio < 0.0f && kl > low;
  }
  if (advantage > 0.0f ? above : below) {
    out.hit = advantage > 0.0f ? kClipHigh : kClipLow;
    return out;
  }
  const float ratio = expf(log_ratio);
  if (ratio > o.dual_clip) out.hit = kClipDual;
  out.d_logprob = -(ratio > o.dual_clip ? o.dual_clip : ratio) * advantage;
  out.value = out.d_logprob == 0.0f ? 0.0f : out.d_logprob * logprob;  // a log-prob of -inf: not 0 * -inf
  return out;
}

// -A l
DAPO_HOST_DEVICE TokenLoss reinforce_term(float logprob, float advantage) {
  TokenLoss out{0.0f, 0.0f, 0.0f, 0.0f, kClipNone};
  if (advantage == 0.0f) return out;
  out.value = -advantage * logprob;
  out.d_logprob = -advantage;
  return out;
}

// -A l for a positive advantage, else the clip's
DAPO_HOST_DEVICE TokenLoss up_term(float logprob, float log_ratio, float advantage, const Objective& o) {
  return advantage > 0.0f ? reinforce_term(logprob, advantage) : clip_term(log_ratio, advantage, o);
}

// Estimate of KL(pi || pi_ref) and its derivative by l; d = l_ref - l.
DAPO_HOST_DEVICE void kl_term(float logprob, float ref_logprob, KlEstimator estimator, float* value, float* slope) {
  const float d = ref_logprob - logprob;
  if (estimator == KlEstimator::k1) {
    *value = -d;
    *slope = 1.0f;
  } else if (estimator == KlEstimator::k2) {
    *value = 0.5f * d * d;
    *slope = -d;
  } else {
    const float growth = expm1f(d);
    *value = growth - d;
    *slope = -growth;
  }
}

DAPO_HOST_DEVICE TokenLoss token_objective(float logprob, float log_ratio, float advantage, float ref_logprob,
                                           float importance_weight, const Objective& o) {
  // The last branch is dppo_tv and dppo_kl: the bindings refuse an index that is not of Surrogate.
  TokenLoss out = o.surrogate == Surrogate::clip    ? clip_term(log_ratio, advantage, o)
                  : o.surrogate == Surrogate::cispo ? cispo_term(logprob, log_ratio, advantage, o)
                  : o.surrogate == Surrogate::sapo  ? sapo_term(log_ratio, advantage, o)
                  : o.surrogate == Surrogate::reinforce ? reinforce_term(logprob, advantage)
                  : o.surrogate == Surrogate::up        ? up_term(logprob, log_ratio, advantage, o)
                                                        : dppo_term(logprob, log_ratio, advantage, o);
  if (importance_weight == 0.0f) {  // silences a policy term that overflows too
    out.value = out.d_logprob = out.d_log_ratio = 0.0f;
  } else {
    out.value *= importance_weight;
    out.d_logprob *= importance_weight;
    out.d_log_ratio *= importance_weight;
  }
  if (o.kl_coef == 0.0f) return out;
  float kl, slope;
  kl_term(logprob, ref_logprob, o.kl_estimator, &kl, &slope);
  if (o.kl_through_ratio) {
    const float ratio = expf(log_ratio);
    kl *= ratio;
    slope *= ratio;
    out.d_log_ratio += o.kl_coef * kl;
  }
  out.kl = kl;
  out.value += o.kl_coef * kl;
  out.d_logprob += o.kl_coef * slope;
  return out;
}

}  // namespace dapo
