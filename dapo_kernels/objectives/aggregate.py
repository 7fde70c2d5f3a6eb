"""Token weights, which aggregate token losses to the scalar loss = Σ_t weight_t · L_t.

The denominator can be a global count, given as a tensor. Then splitting, packing or re-ordering a batch does not change
a gradient, and nothing is copied to the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels.objectives.table import PROMPT_MEAN, Objective
from dapo_kernels.records import on_host


class PromptGroups(NamedTuple):
    """The groups of responses for ``"prompt-mean-token-mean"``, one group per prompt; [S] each.

    One of the two may be missing. Without ``ids`` the call must give the number of prompts; without ``tokens`` the
    groups are counted.
    """

    ids: Tensor | None  # int64 in [0, S), equal where two sequences answer the same prompt
    tokens: Tensor | None  # live tokens of the sequence's group over the whole mini-batch


def sequence_sums(values: Tensor, sequence_ids: Tensor, n_sequences: int) -> Tensor:
    """Return the sum of each sequence, [S], deterministically. ``values`` [N], ``sequence_ids`` int64 [N]."""
    zeros = values.new_zeros(n_sequences)
    if on_host(values):
        return zeros.index_add(0, sequence_ids, values)
    # On a GPU index_add uses atomic additions in random order. This operator sorts by sequence first. The public
    # index_put may wait for the device to check the range of its indices; gathering with them checks it anyway.
    added: Tensor = torch.ops.aten._unsafe_index_put(zeros, [sequence_ids], values, True)
    return added


def token_weights(
    objective: Objective,
    live: Tensor,
    all_live: bool,
    sequence_ids: Tensor | None,
    n_sequences: int,
    denominator: float | Tensor | None,
    dtype: torch.dtype,
    groups: PromptGroups | None = None,
) -> Tensor:
    """Return the weight of every token in the scalar loss, [N] of ``dtype``; exactly 0 on masked tokens.

    Args:
        live: bool [N].
        all_live: whether all tokens are known to be live.
        sequence_ids: int64 [N], each token's sequence; required unless the aggregate is ``"token-mean"``.
        denominator: replaces the local count of tokens (``token-mean``), of prompts (``prompt-mean-token-mean``) or of
            sequences. Only prompts and sequences with a live token count.
        groups: required with ``prompt-mean-token-mean``.
    """
    compiles = torch.compiler.is_compiling()  # ``full`` would make a number a constant of the graph
    if objective.aggregate == "token-mean" and all_live and not compiles and not isinstance(denominator, Tensor):
        return torch.full(live.shape, 1.0 / (denominator or max(live.numel(), 1)), dtype=dtype, device=live.device)
    weights = live.to(dtype)
    if objective.aggregate == "token-mean":
        count = weights.sum().clamp(min=1.0) if denominator is None else denominator
        return torch.where(live, weights / count, 0.0)
    assert sequence_ids is not None
    lengths = sequence_sums(weights, sequence_ids, n_sequences)
    if objective.aggregate == PROMPT_MEAN:
        assert groups is not None
        group_tokens, count = _of_groups(groups, lengths, denominator)
        return torch.where(live, weights / (group_tokens[sequence_ids] * count), 0.0)
    count = (lengths > 0).sum().clamp(min=1) if denominator is None else denominator
    if objective.aggregate == "seq-mean-token-mean":
        weights = weights / lengths.clamp(min=1.0)[sequence_ids]
    elif objective.aggregate == "seq-mean-token-sum-norm":
        assert objective.length_norm is not None
        count = count * objective.length_norm
    return torch.where(live, weights / count, 0.0)


def _of_groups(
    groups: PromptGroups, lengths: Tensor, denominator: float | Tensor | None
) -> tuple[Tensor, Tensor | float]:
    """Return the live tokens of every sequence's group [S], and the number of prompts. ``lengths`` [S]: live tokens."""
    if groups.ids is None:
        assert groups.tokens is not None
        assert denominator is not None
        return groups.tokens, denominator
    counted = sequence_sums(lengths, groups.ids, lengths.shape[0])
    prompts = (counted > 0).sum() if denominator is None else denominator
    return (counted[groups.ids] if groups.tokens is None else groups.tokens), prompts
