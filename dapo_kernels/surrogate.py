"""The per-token objective: one body, in elementwise operations only.

For a token with log-prob ℓ, log-ratio δ (ρ = exp δ), advantage A, reference log-prob ℓ_ref and importance weight u::

    L(ℓ, δ) = u · policy(ℓ, δ, A) + kl_coef · kl(ℓ_ref − ℓ) [· ρ]

Every function returns its value together with its stated derivatives. ``ops`` is the namespace the body draws its
elementwise functions from: torch here; other front ends bind the same functions to their own. The C++ and CUDA twin
is ``csrc/surrogate.h``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch as ops

from dapo_kernels.objectives import KL_ESTIMATORS, SURROGATES, Objective

CLIPPED_LOW, CLIPPED_HIGH, CLIPPED_DUAL = 1, 2, 3


class ObjectiveScalars(NamedTuple):
    """What the O(tokens) arithmetic knows of an objective. Kernels take it as a list of floats, names as indices."""

    surrogate: str
    clip_low: float
    clip_high: float
    dual_clip: float  # inf when off
    kl_coef: float
    kl_estimator: str
    kl_through_ratio: bool

    @classmethod
    def of(cls, objective: Objective) -> ObjectiveScalars:
        dual_clip = float("inf") if objective.dual_clip is None else objective.dual_clip
        return cls(
            objective.surrogate,
            objective.clip_low,
            objective.clip_high,
            dual_clip,
            objective.kl_coef,
            objective.kl_estimator,
            objective.kl_through_ratio,
        )

    def pack(self) -> list[float]:
        names = (SURROGATES.index(self.surrogate), KL_ESTIMATORS.index(self.kl_estimator))
        numbers = (self.clip_low, self.clip_high, self.dual_clip, self.kl_coef, self.kl_through_ratio)
        return [float(x) for x in names + numbers]

    @classmethod
    def unpack(cls, packed: list[float]) -> ObjectiveScalars:
        surrogate, estimator, clip_low, clip_high, dual_clip, kl_coef, through_ratio = packed
        return cls(
            SURROGATES[int(surrogate)],
            clip_low,
            clip_high,
            dual_clip,
            kl_coef,
            KL_ESTIMATORS[int(estimator)],
            bool(through_ratio),
        )


def clip_term(log_ratio: Any, advantage: Any, clip_low: float, clip_high: float, dual_clip: float) -> Any:
    """−min(ρA, clip(ρ)A), for A < 0 at most −dual_clip·A. Returns value, d/dδ, and which clip was hit."""
    ratio = ops.exp(log_ratio)
    unclipped = -ratio * advantage
    clipped = -ops.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    # Ties take the first branch: at ρ = 1 the gradient is −A. A NaN takes it too, and so stays visible.
    first = ~(unclipped < clipped)
    value = ops.where(first, unclipped, clipped)
    bound = -dual_clip * advantage
    capped = (advantage < 0) & (value > bound)
    value = ops.where(capped, bound, value)
    slope = ops.where(first & ~capped, unclipped, 0.0)
    hit = ops.where(first, 0, ops.where(advantage < 0, CLIPPED_LOW, CLIPPED_HIGH))
    hit = ops.where(capped, CLIPPED_DUAL, hit)
    # A ratio that overflows must not turn a zero advantage into inf · 0.
    idle = advantage == 0
    return ops.where(idle, 0.0, value), ops.where(idle, 0.0, slope), ops.where(idle, 0, hit)


def kl_term(logprob: Any, ref_logprob: Any, estimator: str) -> Any:
    """Estimate of KL(π‖π_ref) from one sample. Returns value and d/dℓ."""
    d = ref_logprob - logprob
    if estimator == "k1":
        return -d, ops.ones_like(d)
    if estimator == "k2":
        return 0.5 * d * d, -d
    growth = ops.expm1(d)
    return growth - d, -growth


def token_objective(
    logprob: Any,
    log_ratio: Any,
    advantage: Any,
    ref_logprob: Any,
    importance_weight: Any,
    *,
    surrogate: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coef: float,
    kl_estimator: str,
    kl_through_ratio: bool,
) -> Any:
    """One token's loss without entropy: L, ∂L/∂ℓ, ∂L/∂δ, which clip was hit, the KL estimate (zeros without one)."""
    nothing = ops.zeros_like(logprob)
    if surrogate == "clip":
        value, d_ratio, hit = clip_term(log_ratio, advantage, clip_low, clip_high, dual_clip)
        d_logprob = nothing
    else:
        idle = advantage == 0
        value = ops.where(idle, 0.0, -advantage * logprob)
        d_logprob, d_ratio, hit = -advantage, nothing, ops.zeros_like(logprob)
    if importance_weight is not None:
        value, d_logprob, d_ratio = (importance_weight * x for x in (value, d_logprob, d_ratio))
    if kl_coef == 0.0:
        return value, d_logprob, d_ratio, hit, nothing
    kl, d_kl = kl_term(logprob, ref_logprob, kl_estimator)
    if kl_through_ratio:
        ratio = ops.exp(log_ratio)
        kl, d_kl = ratio * kl, ratio * d_kl
        d_ratio = d_ratio + kl_coef * kl
    return value + kl_coef * kl, d_logprob + kl_coef * d_kl, d_ratio, hit, kl
