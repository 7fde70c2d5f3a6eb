"""Measure and correct the mismatch between the log-probs of engine and trainer.

With μ the engine's probability of a sampled token, π the trainer's before any update of the step, Δ = log π − log μ
and means over the n tokens of a step that train:

    rollout_gap, rollout_gap_max    mean and largest |Δ|
    rollout_k3                      mean of e^Δ − Δ − 1, an estimate of KL(μ‖π)
    rollout_ess                     (Σ e^Δ)² / (n Σ e^2Δ), the effective sample size; 1 without a mismatch

Correction multiplies the policy term of each token by a weight:

    weights: token      e^Δ, at least floor and at most cap: truncated importance sampling
    weights: sequence   e^{ΣΔ}, the sum over the response, likewise
    mask: token         0 where e^Δ is outside [lower_bound, bound]
    mask: sequence      0 for every token of a response with e^{mean Δ} outside [lower_bound, bound]

`weights: token` with `mask: token` is IcePop (Ring-1T, arXiv 2510.18855). rollout_masked is the share of tokens with
weight 0, rollout_truncated the share of tokens with weight floor or cap.

A token without a finite log-prob of the engine counts as Δ = 0. The means leave it out; rollout_unknown is the share of
such tokens. A token with weight 0 still counts in the denominator of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dapo_runner.config import CorrectionConfig


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens. They add up over micro-batches and mini-batches."""

    tokens: int = 0
    gap: float = 0.0
    gap_max: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    masked: int = 0  # tokens with weight 0
    truncated: int = 0  # tokens with weight floor or cap
    limited: int = 0  # tokens whose weight is limited by floor and cap
    unknown: int = 0  # tokens without a finite log-prob of the engine; not counted in ``tokens``

    def __add__(self, other: Mismatch) -> Mismatch:
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        return Mismatch(**sums | {"gap_max": max(self.gap_max, other.gap_max)})

    def metrics(self) -> dict[str, float]:
        if not self.tokens:
            return {"rollout_unknown": 1.0} if self.unknown else {}
        truncated = {"rollout_truncated": self.truncated / self.limited} if self.limited else {}
        return truncated | {
            "rollout_gap": self.gap / self.tokens,
            "rollout_gap_max": self.gap_max,
            "rollout_k3": self.k3 / self.tokens,
            "rollout_ess": self.ratio**2 / (self.tokens * self.ratio_squared),
            "rollout_masked": self.masked / self.tokens,
            "rollout_unknown": self.unknown / (self.tokens + self.unknown),
        }


def measure(
    learner: Tensor,
    engine: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    limits: tuple[float, float] | None = None,
) -> Mismatch:
    """Compare log-probs float32 [T] under ``mask`` bool [T]. ``weights`` come from ``correct``, with ``limits``."""
    known = mask & engine.isfinite()
    delta, unknown = (learner - engine)[known].double(), int((mask & ~known).sum())
    if not delta.numel():
        return Mismatch(unknown=unknown)
    ratio = delta.exp()
    sums = torch.stack([delta.abs().sum(), delta.abs().max(), (ratio - delta - 1).sum(), ratio.sum(), (ratio**2).sum()])
    gap, gap_max, k3, total, squared = sums.tolist()
    known_weights = torch.ones_like(delta) if weights is None else weights[known]
    masked = int((known_weights == 0).sum())
    low, high = limits or (0.0, math.inf)
    truncated = int(((known_weights > 0) & ((known_weights <= low) | (known_weights >= high))).sum())
    limited = delta.numel() if limits else 0
    return Mismatch(delta.numel(), gap, gap_max, k3, total, squared, masked, truncated, limited, unknown)


def correct(
    learner: Tensor, engine: Tensor, mask: Tensor, cu_seqlens: Tensor, config: CorrectionConfig
) -> Tensor | None:
    """Return the weight of each token, float32 [T], 1 where ``mask`` bool [T] is False; None if correction is off.

    Log-probs are float32 [T], cu_seqlens int32 [S+1].
    """
    if not config.enabled:
        return None
    delta = torch.where(mask & engine.isfinite(), learner - engine, 0.0)
    weights = torch.ones_like(delta)
    if config.weights is not None:
        log_ratio = delta if config.weights == "token" else _reduce_sequences(delta, mask, cu_seqlens, mean=False)
        weights = log_ratio.exp().clamp(max(config.floor, 1e-30), config.cap)  # 0 is for masked tokens
    if config.mask is not None:
        log_ratio = delta if config.mask == "token" else _reduce_sequences(delta, mask, cu_seqlens, mean=True)
        low, high = math.log(config.lower_bound or 1 / config.bound), math.log(config.bound)
        weights = weights.where((log_ratio >= low) & (log_ratio <= high), 0.0)
    return torch.where(mask, weights, 1.0)


def _reduce_sequences(values: Tensor, mask: Tensor, cu_seqlens: Tensor, *, mean: bool) -> Tensor:
    """Return for each token the sum of its sequence, or the mean over the masked-in tokens of its sequence."""
    lengths = cu_seqlens.diff().long()
    totals = torch.segment_reduce(values, "sum", lengths=lengths)
    if mean:
        totals = totals / torch.segment_reduce(mask.to(values.dtype), "sum", lengths=lengths).clamp(min=1)
    return totals.repeat_interleave(lengths)
