"""Which tokens train, where that takes the whole batch to decide. All tensors [N], nothing differentiable.

A selection can be made once over the full batch and handed to every micro-batch (``selection=``): then splitting the
batch does not change what is selected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dapo_kernels.objectives.surrogate import ObjectiveScalars, token_objective
from dapo_kernels.objectives.table import Objective


def covariance(logprobs: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    """(A − mean A)(ℓ − mean ℓ) over live tokens (Cui et al. 2025, eq. 10); −inf on dead ones."""
    count = live.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(live, x, 0.0)
        return x - x.sum() / count

    return torch.where(live, centred(logprobs) * centred(advantages), -math.inf)


def highest(scores: Tensor, live: Tensor, count: Tensor) -> Tensor:
    """bool: the ``count`` live tokens of highest score; ties go to the earlier token. No host sync."""
    order = torch.where(live, scores, -math.inf).argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return live & (rank < count)


def share_of(live: Tensor, share: float, *, rounding: str) -> Tensor:
    """How many tokens a share of the live ones is; 0-d. At least one, as the papers' code has it."""
    count = live.sum().double() * share
    # A share such as 0.2 is not exact in binary: 0.2 · 10 must not round up to 3.
    count = torch.ceil(count - 1e-9) if rounding == "up" else torch.floor(count + 1e-9)
    return count.clamp(min=1)


def top_entropy(entropy: Tensor, live: Tensor, share: float) -> Tensor:
    """bool: the live tokens of highest entropy, a share of the live ones rounded up."""
    return highest(entropy, live, share_of(live, share, rounding="up"))


def clip_hits(
    objective: Objective, logprobs: Tensor, log_ratio: Tensor | None, advantages: Tensor, live: Tensor
) -> Tensor:
    """int8: which clip the surrogate hits (0: none); 0 on dead tokens. ``log_ratio`` None: on-policy."""
    delta = torch.zeros_like(logprobs) if log_ratio is None else log_ratio
    scalars = ObjectiveScalars.of(objective)
    *_, hit, _ = token_objective(logprobs, delta, advantages, None, None, **scalars.per_token)
    return torch.where(live, hit, 0).to(torch.int8)


def clip_cov(
    logprobs: Tensor,
    advantages: Tensor,
    live: Tensor,
    clip_hit: Tensor,
    clip_cov: tuple[float, float, float],
    generator: torch.Generator | None,
) -> Tensor:
    """bool: random live tokens with covariance within (low, high) that the ratio clip left alone."""
    share, low, high = clip_cov
    scores = covariance(logprobs, advantages, live)
    candidates = live & (clip_hit == 0) & (scores > low) & (scores < high)
    lots = torch.rand(scores.shape, generator=generator, device=scores.device)
    return highest(lots, candidates, share_of(live, share, rounding="down"))


def kl_cov(logprobs: Tensor, advantages: Tensor, live: Tensor, kl_cov: tuple[float, float]) -> Tensor:
    """bool: the live tokens of highest covariance, a share of the live ones rounded down."""
    return highest(covariance(logprobs, advantages, live), live, share_of(live, kl_cov[0], rounding="down"))
