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


BONUS = 0.01


def entropy_bonus(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """Return DAPO minus 0.01 times the mean entropy [N] of the live tokens: log-probs and entropies with gradients."""
    assert tokens.entropy is not None
    return dapo(logprobs, tokens) - BONUS * (tokens.entropy * tokens.mask).sum() / tokens.mask.sum()


FORMULAS: dict[str, Callable[[Tensor, Tokens], Tensor]] = {
    "dapo": dapo,
    "reinforce": reinforce,
    "entropy_bonus": entropy_bonus,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "entropy_bonus": {"objective": "dapo", "entropy_coef": BONUS},
}
