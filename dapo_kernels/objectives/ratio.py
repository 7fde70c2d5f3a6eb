"""Ratio levels: from token log-probs to the log-ratio the surrogate sees. O(tokens), differentiable.

With δ_t = ℓ_t − ℓ_old,t and n_i live tokens in sequence i (GSPO, eq. 7 and 14)::

    token           δ_t
    sequence        s_i = Σ δ_t / n_i, with its gradient through every token of i
    sequence_token  value s_i, gradient of the token's own ratio: sg[s_i − ℓ_t] + ℓ_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from dapo_kernels.objectives.aggregate import sequence_sums


def log_ratio(
    level: str,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    live: Tensor,
    sequence_ids: Tensor | None,
    n_sequences: int,
) -> Tensor | None:
    """[N], or ``None`` for token-level on-policy ratios, which are 1. All inputs [N]."""
    if level == "token":
        return None if old_logprobs is None else logprobs - old_logprobs
    assert sequence_ids is not None
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    delta = torch.where(live, logprobs - old_logprobs, 0.0)
    lengths = sequence_sums(live.to(delta.dtype), sequence_ids, n_sequences).clamp(min=1.0)
    mean = (sequence_sums(delta, sequence_ids, n_sequences) / lengths)[sequence_ids]
    return mean if level == "sequence" else (mean - logprobs).detach() + logprobs
