"""Ratio levels: the log-ratio of the surrogate from token log-probs, and weights of sequences. O(tokens).

With δ_t = ℓ_t − ℓ_old,t and n_i live tokens in sequence i (GSPO, eq. 7 and 14)::

    token             δ_t
    sequence          s_i = Σ δ_t / n_i, with gradients through all tokens of i
    sequence_token    value s_i, gradient of the token's own ratio: sg[s_i] + (ℓ_t − sg[ℓ_t])
    sequence_clipped  Σ c_t / n_i, c_t = min(δ_t, log(1 + clip_high)) for A > 0 and max(δ_t, log(1 − clip_low)) for
                      A < 0 (GMPO); the surrogate clips nothing more
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_kernels.objectives.aggregate import sequence_sums
from dapo_kernels.objectives.table import Objective


def log_ratio(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    live: Tensor,
    sequence_ids: Tensor | None,
    n_sequences: int,
) -> Tensor | None:
    """Return log-ratios [N]; ``None`` for token-level on-policy ratios, which are 1. All inputs [N]; differentiable."""
    level = objective.ratio
    if level == "token":
        return None if old_logprobs is None else logprobs - old_logprobs
    assert sequence_ids is not None
    delta = _zeros_of(logprobs) if old_logprobs is None else logprobs - old_logprobs
    if level == "sequence_clipped":
        delta = _clipped(objective, delta, advantages)
    mean = _sequence_means(delta, live, sequence_ids, n_sequences)
    return mean.detach() + _zeros_of(logprobs) if level == "sequence_token" else mean


def clipped_log_ratio(
    objective: Objective, logprobs: Tensor, old_logprobs: Tensor | None, log_ratio: Tensor | None
) -> Tensor | None:
    """Return the log-ratio to clip: the token's own for ``"sequence_clipped"``, which clips before the mean, else the
    input of the surrogate."""
    if objective.ratio != "sequence_clipped":
        return log_ratio
    return None if old_logprobs is None else logprobs - old_logprobs


def sequence_weight(
    objective: Objective,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    live: Tensor,
    sequence_ids: Tensor | None,
    n_sequences: int,
) -> Tensor | None:
    """Return the factor of each token's policy term that depends on its sequence, [N]; ``None`` is 1."""
    if not objective.sequence_weight or old_logprobs is None:
        return None
    assert sequence_ids is not None
    delta = (logprobs - old_logprobs).detach()
    weight = torch.ones_like(delta)
    if objective.vespo is not None:
        k, decay, k_negative, decay_negative = objective.vespo
        total = _live_sums(delta, live, sequence_ids, n_sequences)[sequence_ids]
        spread = 1.0 - total.exp()
        weight = torch.where(advantages < 0, k_negative * total + decay_negative * spread, k * total + decay * spread)
        weight = weight.exp().to(delta.dtype)
    if objective.off_policy_mask is not None:
        distance = -_sequence_means(delta, live, sequence_ids, n_sequences)
        weight = torch.where((advantages < 0) & (distance > objective.off_policy_mask), 0.0, weight)
    return weight


def _zeros_of(logprobs: Tensor) -> Tensor:
    """Return zeros with the gradient of ``logprobs``. A log-prob of −∞ gets none: −∞ + ∞ would be NaN."""
    finite = torch.where(logprobs == -math.inf, 0.0, logprobs)
    return finite - finite.detach()


def _sequence_means(values: Tensor, live: Tensor, sequence_ids: Tensor, n_sequences: int) -> Tensor:
    """Return for each token the mean over the live tokens of its sequence, [N]."""
    lengths = sequence_sums(live.double(), sequence_ids, n_sequences).clamp(min=1.0)
    return (_live_sums(values, live, sequence_ids, n_sequences) / lengths)[sequence_ids].to(values.dtype)


def _live_sums(values: Tensor, live: Tensor, sequence_ids: Tensor, n_sequences: int) -> Tensor:
    """Return the sum over the live tokens of each sequence, float64 [S]. In float32 the error of a response's gradient
    would grow with its length: 1e-4 for 20,000 tokens.
    """
    return sequence_sums(torch.where(live, values, 0.0).double(), sequence_ids, n_sequences)


def _clipped(objective: Objective, delta: Tensor, advantages: Tensor) -> Tensor:
    low = -math.inf if objective.clip_low == 1 else math.log1p(-objective.clip_low)
    high = math.log1p(objective.clip_high)
    above, below = (advantages > 0) & (delta > high), (advantages < 0) & (delta < low)
    return torch.where(above, high, torch.where(below, low, delta))
