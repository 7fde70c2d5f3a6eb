"""The objectives spelled out as a user of plain PyTorch writes them: what eager contestants run and what checks use.

Deliberately not the code of ``dapo_kernels``: a check against it would compare a thing with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Per-token inputs, each [N]; sequences are equal in length."""

    target_ids: Tensor  # int64
    old_logprobs: Tensor  # float32
    advantages: Tensor  # float32, constant within a sequence
    mask: Tensor  # bool, which tokens train
    n_sequences: int


def dapo(logprobs: Tensor, tokens: Tokens) -> Tensor:
    """−Σ min(ρA, clip(ρ, 0.8, 1.28)·A) / live tokens (DAPO, eq. 8), from log-probs [N]."""
    ratio = torch.exp(logprobs - tokens.old_logprobs)
    clipped = torch.clamp(ratio, 1 - 0.2, 1 + 0.28)
    loss = -torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    return (loss * tokens.mask).sum() / tokens.mask.sum()


FORMULAS: dict[str, Callable[[Tensor, Tokens], Tensor]] = {"dapo": dapo}
