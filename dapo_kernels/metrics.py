"""What a loss call reports beside the loss: sums over live tokens, which add up across micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dapo_kernels.surrogate import CLIPPED_DUAL, CLIPPED_HIGH, CLIPPED_LOW

_COUNTS = ("tokens", "nonfinite")


def loss_metrics(
    live: Tensor,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    log_ratio: Tensor | None,
    clip_hit: Tensor,
    ref_kl: Tensor | None,
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over live tokens (and maxima) as 0-d tensors; all inputs [N], detached. No host sync.

    ``log_ratio`` is what the surrogate saw, where that is not the token's own.
    """
    delta = torch.zeros_like(logprobs) if old_logprobs is None else logprobs - old_logprobs
    delta = torch.where(live, delta, 0.0)
    ratio = torch.where(live, (delta if log_ratio is None else log_ratio).exp(), 0.0)
    tokens = live.sum()
    zero = torch.zeros_like(tokens, dtype=logprobs.dtype)
    return {
        "tokens": tokens,
        "clip_low": (clip_hit == CLIPPED_LOW).sum(),
        "clip_high": (clip_hit == CLIPPED_HIGH).sum(),
        "clip_dual": (clip_hit == CLIPPED_DUAL).sum(),
        "ratio": ratio.sum(),
        "ratio_max": ratio.amax() if ratio.numel() else zero,
        "approx_kl": -delta.sum(),
        "ref_kl": zero if ref_kl is None else ref_kl.sum(),
        "entropy": zero if entropy is None else entropy.sum(),
        "nonfinite": (live & ~torch.isfinite(logprobs)).sum(),
    }


def summarize(metrics: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of one call, or of many (micro-batches, ranks), as plain numbers.

    Sums become means per live token; ``tokens`` and ``nonfinite`` stay counts and keys ending in ``_max`` maxima.
    Without a live token every mean is 0. Reads the values back to the host.
    """
    parts = [metrics] if isinstance(metrics, Mapping) else list(metrics)
    if not parts:
        raise ValueError("summarize: no metrics were given")
    names = list(parts[0])
    table = torch.stack([torch.stack([part[name].detach().double().cpu() for name in names]) for part in parts])
    sums, maxima = table.sum(0).tolist(), table.amax(0).tolist()
    total = dict(zip(names, sums, strict=True))
    largest = dict(zip(names, maxima, strict=True))
    tokens = max(total["tokens"], 1.0)
    return {
        name: largest[name] if name.endswith("_max") else total[name] if name in _COUNTS else total[name] / tokens
        for name in names
    }
