"""The per-token records that pass between the public functions, the operators and the backends. All tensors are [T]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """Flat per-token inputs: ``live`` bool, the rest float32 (float64 when the logits are)."""

    live: Tensor
    weights: Tensor  # of each token in the scalar loss, 0 on dead tokens
    advantages: Tensor
    old_logprobs: Tensor | None  # None: on-policy, ratio 1 with its gradient
    ref_logprobs: Tensor | None
    importance_weights: Tensor | None

    def rows(self, index: Tensor | slice) -> Tokens:
        return Tokens._make(None if x is None else x[index] for x in self)


class TokenLoss(NamedTuple):
    """Policy and KL loss over all tokens, without entropy, and its derivatives."""

    loss: Tensor  # 0-d
    d_logprobs: Tensor
    d_log_ratio: Tensor
    clip_hit: Tensor  # int8: 0 none, 1 low, 2 high, 3 dual
    ref_kl: Tensor | None  # when kl_coef is not 0


class RowLoss(NamedTuple):
    """The whole loss of the rows whose gradient stands in their logits' place."""

    loss: Tensor  # 0-d
    logprobs: Tensor
    entropy: Tensor | None
    clip_hit: Tensor
    ref_kl: Tensor | None
    idle: Tensor  # bool: the gradient row is zero


def empty_stats(target_ids: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Float32 room for log-probs [T], normalizer [T, 2] and entropies [T], for a kernel to fill."""
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32, device=target_ids.device)
    entropy = torch.empty_like(logprobs) if want_entropy else None
    return logprobs, logprobs.new_empty(*target_ids.shape, 2), entropy


def empty_row_loss(
    target_ids: Tensor, want_entropy: bool, want_kl: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    """Room for the fields of ``RowLoss`` after the loss."""
    logprobs = torch.empty(target_ids.shape, dtype=torch.float32, device=target_ids.device)
    entropy = torch.empty_like(logprobs) if want_entropy else None
    ref_kl = torch.empty_like(logprobs) if want_kl else None
    clip_hit = torch.empty_like(logprobs, dtype=torch.int8)
    idle = torch.empty_like(logprobs, dtype=torch.bool)
    return logprobs, entropy, clip_hit, ref_kl, idle


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax arithmetic and of per-token results."""
    return torch.float64 if dtype == torch.float64 else torch.float32
