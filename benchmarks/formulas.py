"""The objectives as a user of plain PyTorch writes them, for eager contestants and for the check.

This is deliberately not the code of ``dapo_kernels``, which it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Per-token inputs, each [N]; sequences are equal in length."""

    target_ids: Tensor  # int64
    old_logprobs: Tensor  # float32
    advantages: Tensor  # float32, constant within a sequence
    mask: Tensor  # bool, which tokens train
    n_sequences: int
    entropy: Tensor | None = None  # float, where the objective needs it


def dapo(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return −Σ min(ρA, clip(ρ, 0.8, 1.28)·A) / live tokens (DAPO, eq. 8), from log-probs [N]."""
    ratio = torch.exp(logprobs - tokens.old_logprobs)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    return (loss * tokens.mask).sum() / tokens.mask.sum()


def reinforce(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return −Σ A ℓ / live tokens (Williams 1992), from log-probs [N]."""
    return -(tokens.advantages * logprobs * tokens.mask).sum() / tokens.mask.sum()


def gspo(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return DAPO's clip on s = exp(mean of ℓ − ℓ_old over a sequence), mean over sequences (GSPO, eq. 5), from [N]."""
    live = tokens.mask.view(tokens.n_sequences, -1)
    delta = (logprobs - tokens.old_logprobs).view(tokens.n_sequences, -1)
    ratio = torch.exp((delta * live).sum(1) / live.sum(1))
    advantages = tokens.advantages.view(tokens.n_sequences, -1)[:, 0]
    return -torch.minimum(ratio * advantages, torch.clamp(ratio, 1 - 0.2, 1 + 0.28) * advantages).mean()


def top_entropy(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return DAPO on the fifth of the live tokens with the highest entropy (Wang et al. 2025) ÷ all live tokens."""
    assert tokens.entropy is not None
    count = int(0.2 * int(tokens.mask.sum()) + 1 - 1e-9)
    order = tokens.entropy.detach().masked_fill(~tokens.mask, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(tokens.mask).index_fill(0, order[:count], True)
    return dapo(logprobs, tokens._replace(mask=chosen)) * chosen.sum() / tokens.mask.sum()


BONUS = 0.01


def entropy_bonus(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return DAPO minus 0.01 times the mean entropy [N] of the live tokens: log-probs and entropies with gradients."""
    assert tokens.entropy is not None
    return dapo(logprobs, tokens) - BONUS * (tokens.entropy * tokens.mask).sum() / tokens.mask.sum()


FORMULAS: dict[str, Callable[[Tensor, Tokens], Tensor]] = {
    "dapo": dapo,
    "reinforce": reinforce,
    "gspo": gspo,
    "top_entropy": top_entropy,
    "entropy_bonus": entropy_bonus,
}

# GSPO's own range, 3e-4 and 4e-4, would clip every sequence of these inputs: nothing would be left to compute.
OVERRIDES: dict[str, dict[str, Any]] = {
    "gspo": {"clip_low": 0.2, "clip_high": 0.28},
    "entropy_bonus": {"objective": "dapo", "entropy_coef": BONUS},
}
