"""Compute differentiable log-probs and entropies, from logits or from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from dapo_kernels.backends import backend_for, call_from_logits, starts_of_rows
from dapo_kernels.engine import hidden as from_hidden
from dapo_kernels.engine import rows as from_rows
from dapo_kernels.head import head_of_call
from dapo_kernels.layout import Layout, SamplingMask, check_flag, check_rows_apart, layout_of
from dapo_kernels.records import HeadOptions
from dapo_kernels.sharding import (
    RaiseEverywhere,
    ShardOptions,
    head_of_ranks,
    logits_of_call,
    parts_of,
    shared_plan,
    shared_server,
)
from dapo_kernels.signature import refuse_unknown, shows_options


class LinearLogprobsOptions(HeadOptions, ShardOptions, total=False):
    pass


class TokenStats(NamedTuple):
    """``logprobs`` of the targets and, if requested, ``entropy`` of the distribution; both differentiable.

    Example:
        >>> import torch
        >>> from dapo_kernels import TokenStats, token_logprobs
        >>> stats = token_logprobs(torch.zeros(1, 4), torch.tensor([0]), entropy=True)
        >>> isinstance(stats, TokenStats), round(stats.entropy.item(), 4)  # log 4
        (True, 1.3863)
    """

    logprobs: Tensor
    entropy: Tensor | None


def token_logprobs(
    logits: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    inplace_backward: bool = False,
    valid_vocab: int | None = None,
    sampling_mask: SamplingMask | None = None,
    group: dist.ProcessGroup | None = None,
) -> TokenStats:
    """Return log-probs of the targets, log softmax(logits/τ)[target], and entropies of softmax(logits/τ).

    Args:
        logits: [T, V] or [B, L, V]; dtypes and strides as in ``dapo_loss``.
        target_ids: [T] or [B, L].
        temperature: positive number, or one per token.
        entropy: also return −Σ p log p over the vocabulary.
        inplace_backward: let the backward pass overwrite the logits with their gradient.
        valid_vocab, sampling_mask, group: as in ``dapo_loss``.

    Returns:
        float32 tensors (float64 if the logits are) in the layout of ``target_ids``, differentiable with respect to the
        logits.

    Raises:
        ValueError, TypeError, IndexError: as in ``dapo_loss``.

    Example:
        >>> import torch
        >>> from dapo_kernels import token_logprobs
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, float("-inf")]])
        >>> token_logprobs(logits, torch.tensor([1, 0])).logprobs.exp().tolist()
        [0.5, 1.0]
    """
    logits, shard = logits_of_call("token_logprobs", logits, group)
    with RaiseEverywhere(shard, logits):
        layout = layout_of("token_logprobs", "logits", logits, target_ids=target_ids)
        check_flag(layout, "entropy", entropy)
        check_flag(layout, "inplace_backward", inplace_backward)
        request = layout.request(target_ids, temperature, layout.live(None), entropy, sampling_mask)
        kind = call_from_logits(logits), starts_of_rows(logits)
        backend_name = backend_for("token_logprobs", logits.device, logits.dtype, logits.shape[-1], *kind)
        in_place = inplace_backward and from_rows.may_work_in_place(logits, *request)
        if in_place:
            check_rows_apart(layout, logits)
    server = shared_server(layout, shard, logits, backend_name, request, valid_vocab)
    stats = from_rows.stats_of(logits, request, server, in_place)
    return _shaped(layout, stats.logprobs, stats.entropy)


@shows_options
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
    sampling_mask: SamplingMask | None = None,
    **options: Unpack[LinearLogprobsOptions],
) -> TokenStats:
    """Return ``token_logprobs`` of ``softcap(hidden · weightᵀ + bias)``, a chunk of tokens at a time.

    Differentiable with respect to hidden, weight, bias, lora.a and lora.b. The backward pass recomputes the logits
    (four GEMMs in total).

    Args:
        hidden: [T, H] packed or [B, L, H] padded.
        weight: [V, H], the output head (``lm_head.weight``), same dtype as ``hidden``.
        target_ids: [T] or [B, L].
        mask: same shape as ``target_ids``: only these tokens are computed; the others are 0.
        entropy: also return −Σ p log p over the vocabulary.

    ``temperature`` and ``sampling_mask`` are those of ``dapo_loss``, the other arguments and the errors those of
    ``linear_dapo_loss``.

    Returns:
        ``TokenStats``: log-probs and entropies (or None), float32 (float64 if hidden is), in the layout of
        ``target_ids``.

    Example:
        >>> import torch
        >>> from dapo_kernels import linear_token_logprobs
        >>> hidden, weight = torch.ones(2, 8), torch.zeros(4, 8)
        >>> linear_token_logprobs(hidden, weight, torch.tensor([3, 0])).logprobs.exp().tolist()
        [0.25, 0.25]
    """
    hidden, weight, shard = head_of_ranks("linear_token_logprobs", hidden, weight, options)
    with RaiseEverywhere(shard, weight):
        layout = layout_of("linear_token_logprobs", "hidden", hidden, None, parts_of(shard), target_ids)
        head, plan = head_of_call(layout, hidden, weight, mask, options)
        refuse_unknown(layout.caller, options)
        check_flag(layout, "entropy", entropy)
        request = layout.request(target_ids, temperature, layout.live(mask), entropy, sampling_mask)
    head, plan = shared_plan(layout, shard, head, plan, request)
    stats = from_hidden.linear_stats(head, request, plan)
    return _shaped(layout, stats.logprobs, stats.entropy)


def _shaped(layout: Layout, logprobs: Tensor, entropy: Tensor | None) -> TokenStats:
    return TokenStats(logprobs.view(layout.shape), None if entropy is None else entropy.view(layout.shape))
