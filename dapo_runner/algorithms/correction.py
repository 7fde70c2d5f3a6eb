"""Measure how far engine and learner disagree on log-probs, and correct for it.

With μ the engine's probability of a sampled token, π the learner's before any update of the step, Δ = log π − log μ
and means over the n tokens of a step that train:

    rollout_gap, rollout_gap_max    mean and largest |Δ|
    rollout_k3                      mean of e^Δ − Δ − 1, an estimate of KL(μ‖π)
    rollout_ess                     (Σ e^Δ)² / (n Σ e^2Δ), the effective sample size; 1 where the two agree

Correction multiplies the policy term of each token by a weight:

    weights: token      min(e^Δ, cap): truncated importance sampling
    weights: sequence   min(e^{ΣΔ}, cap), the sum over the response
    mask: token         0 where e^Δ is outside [1/bound, bound]
    mask: sequence      0 for every token of a response with e^{mean Δ} outside [1/bound, bound]

A token that the engine gave no log-prob (NaN) counts as Δ = 0. The means leave it out; rollout_unknown is the share of
such tokens. A token of weight 0 still counts in the denominator of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dapo_runner.config import CorrectionConfig


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens, which add up over micro- and mini-batches."""

    tokens: int = 0
    gap: float = 0.0
    gap_max: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    masked: int = 0  # tokens of weight 0
    unknown: int = 0  # tokens without a log-prob of the engine's, which ``tokens`` does not count

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Mismatch(**sums | {"gap_max": max(self.gap_max, other.gap_max)})

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {"rollout_unknown": 1.0} if self.unknown else {}
        return {
            "rollout_gap": self.gap / self.tokens,
            "rollout_gap_max": self.gap_max,
            "rollout_k3": self.k3 / self.tokens,
            "rollout_ess": self.ratio**2 / (self.tokens * self.ratio_squared),
            "rollout_masked": self.masked / self.tokens,
            "rollout_unknown": self.unknown / (self.tokens + self.unknown),
        }


def measure(learner: Tensor, engine: Tensor, mask: Tensor, weights: Tensor | None = None) -> Mismatch:
    """Compare log-probs float32 [T]; ``mask`` bool [T], ``weights`` those of ``correct``."""
    known = mask & ~engine.isnan()
    delta, unknown = (learner - engine)[known].double(), int((mask & ~known).sum())
    if not delta.numel():
        return Mismatch(unknown=unknown)
    ratio = delta.exp()
    sums = torch.stack([delta.abs().sum(), delta.abs().max(), (ratio - delta - 1).sum(), ratio.sum(), (ratio**2).sum()])
    gap, gap_max, k3, total, squared = sums.tolist()
    masked = 0 if weights is None else int((weights[known] == 0).sum())
    return Mismatch(delta.numel(), gap, gap_max, k3, total, squared, masked, unknown)


def correct(
    learner: Tensor, engine: Tensor, mask: Tensor, cu_seqlens: Tensor, config: CorrectionConfig
) -> Tensor | None:
    """Return the weight of each token, float32 [T], 1 where ``mask`` bool [T] is False; None where correction is off.

    Log-probs are float32 [T], cu_seqlens int32 [S+1].
    """
    if not config.enabled:
        return None
    delta = torch.where(mask & ~engine.isnan(), learner - engine, 0.0)
    weights = torch.ones_like(delta)
    if config.weights is not None:
        log_ratio = delta if config.weights == "token" else _reduce_sequences(delta, mask, cu_seqlens, mean=False)
        weights = log_ratio.clamp(max=math.log(config.cap)).exp()
    if config.mask is not None:
        log_ratio = delta if config.mask == "token" else _reduce_sequences(delta, mask, cu_seqlens, mean=True)
        weights = weights.masked_fill(log_ratio.abs() > math.log(config.bound), 0.0)
    return torch.where(mask, weights, 1.0)


def _reduce_sequences(values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, mean: bool) -> Tensor:
    """Return for each token the sum over its sequence, or the mean over the sequence's tokens of the mask."""
    lengths = cu_seqlens.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    totals = values.new_zeros(len(lengths)).index_add(0, sequence, values)
    if mean:
        counts = values.new_zeros(len(lengths)).index_add(0, sequence, mask.to(values.dtype))
        totals = totals / counts.clamp(min=1)
    return totals[sequence]
