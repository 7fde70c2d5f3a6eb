"""The per-token objective, in elementwise operations only, for all backends.

For a token with log-prob ℓ, log-ratio δ (ρ = exp δ), advantage A, reference log-prob ℓ_ref and importance weight u::

    L(ℓ, δ) = u · policy(ℓ, δ, A) + kl_coef · kl(ℓ_ref − ℓ) [· ρ]

Every function returns its value together with its derivatives. ``ops`` is the namespace of elementwise functions: torch
here. ``triton/objective.py`` binds the same functions to Triton's, so they use only what both languages have. The C++
and CUDA version is ``csrc/surrogate.h``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch as ops

from dapo_kernels.objectives.table import KL_ESTIMATORS, SURROGATES, Objective

CLIPPED_LOW, CLIPPED_HIGH, CLIPPED_DUAL = 1, 2, 3


N_PER_TOKEN = 9  # number of leading fields of ``ObjectiveScalars`` that ``token_objective`` takes


class ObjectiveScalars(NamedTuple):
    """The parameters of an objective for O(tokens) arithmetic. Kernels take them as floats, with indices for names."""

    surrogate: str
    clip_low: float
    clip_high: float
    dual_clip: float  # inf when off
    tau_positive: float
    tau_negative: float
    kl_coef: float
    kl_estimator: str
    kl_through_ratio: bool
    entropy_coef: float = 0.0
    own: int = 0  # number of a user-defined function, see ``own.py``; 0: none

    @property
    def per_token(self) -> dict[str, Any]:
        """The arguments of ``token_objective``: all but the entropy bonus, which is computed per row."""
        return dict(zip(self._fields[:N_PER_TOKEN], self[:N_PER_TOKEN], strict=True))

    @classmethod
    def of(cls, objective: Objective) -> ObjectiveScalars:
        """Return the scalars of an objective, as Python floats: Triton would make an integer a compile-time constant,
        and refuses most NumPy numbers. Those of a user-defined function are not read.
        """
        return cls(
            objective.surrogate if isinstance(objective.surrogate, str) else "own",
            float(objective.clip_low),
            float(objective.clip_high),
            float("inf" if objective.dual_clip is None else objective.dual_clip),
            float(objective.sapo_tau[0]),
            float(objective.sapo_tau[1]),
            float(objective.kl_coef),
            objective.kl_estimator,
            objective.kl_through_ratio,
            float(objective.entropy_coef),
        )

    def pack(self) -> list[float]:
        names = {"surrogate": SURROGATES.index(self.surrogate), "kl_estimator": KL_ESTIMATORS.index(self.kl_estimator)}
        return [float(x) for x in (self.per_token | names).values()]


def clip_term(log_ratio: Any, advantage: Any, clip_low: Any, clip_high: Any, dual_clip: Any) -> Any:
    """Return −min(ρA, clip(ρ)A), limited to −dual_clip·A for A < 0, d/dδ, and which bound was hit."""
    ratio = ops.exp(log_ratio)
    unclipped = -ratio * advantage
    clipped = -ops.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage
    # Ties use the first branch: at ρ = 1 the gradient is −A. A NaN uses it too, and so stays visible.
    first = ~(unclipped < clipped)
    value = ops.where(first, unclipped, clipped)
    bound = -dual_clip * advantage
    capped = (advantage < 0) & (value > bound)
    value = ops.where(capped, bound, value)
    slope = ops.where(first & ~capped, unclipped, 0.0)
    hit = ops.where(first, 0, ops.where(advantage < 0, CLIPPED_LOW, CLIPPED_HIGH))
    hit = ops.where(capped, CLIPPED_DUAL, hit)
    # If the ratio overflows, a zero advantage must not give inf · 0.
    idle = advantage == 0
    return ops.where(idle, 0.0, value), ops.where(idle, 0.0, slope), ops.where(idle, 0, hit)


def up_term(logprob: Any, log_ratio: Any, advantage: Any, clip_low: Any, clip_high: Any, dual_clip: Any) -> Any:
    """Return −A·ℓ for A > 0, else what ``clip_term`` returns; d/dℓ, d/dδ, and which bound was hit."""
    value, slope, hit = clip_term(log_ratio, advantage, clip_low, clip_high, dual_clip)
    free = advantage > 0
    value = ops.where(free, -advantage * logprob, value)
    return value, ops.where(free, -advantage, 0.0), ops.where(free, 0.0, slope), ops.where(free, 0, hit)


def cispo_term(logprob: Any, log_ratio: Any, advantage: Any, clip_low: Any, clip_high: Any) -> Any:
    """Return −sg[clip(ρ)]·A·ℓ, d/dℓ, and which bound was hit."""
    ratio = ops.exp(log_ratio)
    idle = advantage == 0
    slope = ops.where(idle, 0.0, -ops.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage)
    hit = ops.where(ratio < 1.0 - clip_low, CLIPPED_LOW, ops.where(ratio > 1.0 + clip_high, CLIPPED_HIGH, 0))
    # A log-prob of −∞ must not give 0 · −∞.
    return ops.where(slope == 0, 0.0, slope * logprob), slope, ops.where(idle, 0, hit)


def dppo_term(logprob: Any, log_ratio: Any, advantage: Any, above: Any, below: Any, dual_clip: Any) -> Any:
    """Return −sg[min(ρ, dual_clip)]·A·ℓ, d/dℓ, and which bound was hit. All are zero if the probability is too far
    ``above`` or ``below`` the old one for the sign of A."""
    ratio = ops.exp(log_ratio)
    hit = ops.where((advantage > 0) & above, CLIPPED_HIGH, ops.where((advantage < 0) & below, CLIPPED_LOW, 0))
    idle = (advantage == 0) | (hit > 0)
    slope = ops.where(idle, 0.0, -ops.clamp(ratio, 0.0, dual_clip) * advantage)
    hit = ops.where((ratio > dual_clip) & ~idle, CLIPPED_DUAL, hit)
    return ops.where(slope == 0, 0.0, slope * logprob), slope, hit


def dppo_tv_term(logprob: Any, log_ratio: Any, advantage: Any, clip_low: Any, clip_high: Any, dual_clip: Any) -> Any:
    """Return DPPO with the total variation between this token and all others, |π − π_old|."""
    shift = ops.exp(logprob) - ops.exp(logprob - log_ratio)
    return dppo_term(logprob, log_ratio, advantage, shift > clip_high, -shift > clip_low, dual_clip)


def dppo_kl_term(logprob: Any, log_ratio: Any, advantage: Any, clip_low: Any, clip_high: Any, dual_clip: Any) -> Any:
    """Return DPPO with the KL divergence between this token and all others."""
    old = logprob - log_ratio
    # Float32 log-probs near 0 are rounded to 0. Without the 1e-8 the other tokens' part would then be unbounded.
    rest, old_rest = ops.clamp(-ops.expm1(logprob), 0.0, 1.0), ops.clamp(-ops.expm1(old), 0.0, 1.0)
    kl = old_rest * ops.log((old_rest + 1e-8) / (rest + 1e-8)) - ops.exp(old) * log_ratio
    above, below = (log_ratio > 0) & (kl > clip_high), (log_ratio < 0) & (kl > clip_low)
    return dppo_term(logprob, log_ratio, advantage, above, below, dual_clip)


def reinforce_term(logprob: Any, advantage: Any) -> Any:
    """Return −A·ℓ and d/dℓ."""
    return ops.where(advantage == 0, 0.0, -advantage * logprob), -advantage


def sapo_term(log_ratio: Any, advantage: Any, tau_positive: Any, tau_negative: Any) -> Any:
    """Return −A·σ(τ(ρ−1))·4/τ and d/dδ = −A·4σ(1−σ)·ρ."""
    ratio = ops.exp(log_ratio)
    tau = ops.where(advantage > 0, ops.zeros_like(advantage) + tau_positive, tau_negative)
    gate = ops.sigmoid(tau * (ratio - 1.0))
    closing = ops.sigmoid(tau * (1.0 - ratio))  # 1 − σ, without the cancellation
    slope = ops.where(closing == 0, 0.0, -4.0 * advantage * gate * closing * ratio)  # gate 0 before ρ overflows
    return -4.0 * advantage * gate / tau, ops.where(advantage == 0, 0.0, slope)


def kl_term(logprob: Any, ref_logprob: Any, estimator: Any) -> Any:
    """Return an estimate of KL(π‖π_ref) from one sample, and d/dℓ."""
    d = ref_logprob - logprob
    if estimator == "k1":
        value, slope = -d, ops.ones_like(d)
    elif estimator == "k2":
        value, slope = 0.5 * d * d, -d
    else:
        growth = ops.expm1(d)
        value, slope = growth - d, -growth
    return value, slope


def token_objective(
    logprob: Any,
    log_ratio: Any,
    advantage: Any,
    ref_logprob: Any,
    importance_weight: Any,
    surrogate: Any,
    clip_low: Any,
    clip_high: Any,
    dual_clip: Any,
    tau_positive: Any,
    tau_negative: Any,
    kl_coef: Any,
    kl_estimator: Any,
    kl_through_ratio: Any,
) -> Any:
    """Return a token's loss L without entropy, ∂L/∂ℓ, ∂L/∂δ, which bound was hit, and the KL estimate (0 without)."""
    nothing = ops.zeros_like(logprob)
    d_logprob, d_ratio, hit = nothing, nothing, nothing
    if surrogate == "clip":
        value, d_ratio, hit = clip_term(log_ratio, advantage, clip_low, clip_high, dual_clip)
    elif surrogate == "cispo":
        value, d_logprob, hit = cispo_term(logprob, log_ratio, advantage, clip_low, clip_high)
    elif surrogate == "dppo_tv":
        value, d_logprob, hit = dppo_tv_term(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip)
    elif surrogate == "dppo_kl":
        value, d_logprob, hit = dppo_kl_term(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip)
    elif surrogate == "up":
        value, d_logprob, d_ratio, hit = up_term(logprob, log_ratio, advantage, clip_low, clip_high, dual_clip)
    elif surrogate == "sapo":
        value, d_ratio = sapo_term(log_ratio, advantage, tau_positive, tau_negative)
    else:
        value, d_logprob = reinforce_term(logprob, advantage)
    if importance_weight is not None:
        # Use where instead of a product: a weight of 0 also removes a policy term that overflows.
        silent = importance_weight == 0
        value = ops.where(silent, 0.0, importance_weight * value)
        d_logprob = ops.where(silent, 0.0, importance_weight * d_logprob)
        d_ratio = ops.where(silent, 0.0, importance_weight * d_ratio)
    kl = nothing
    if ref_logprob is not None:
        kl, d_kl = kl_term(logprob, ref_logprob, kl_estimator)
        if kl_through_ratio:
            ratio = ops.exp(log_ratio)
            kl = ratio * kl
            d_kl = ratio * d_kl
            d_ratio = d_ratio + kl_coef * kl
        value = value + kl_coef * kl
        d_logprob = d_logprob + kl_coef * d_kl
    return value, d_logprob, d_ratio, hit, kl
