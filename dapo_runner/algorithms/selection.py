"""Objectives that choose tokens by looking at the whole batch, over a mini-batch that comes in micro-batches.

The choice is made once, over all training tokens of the mini-batch in the order of its sequences, and handed to
every micro-batch: how the mini-batch was split and packed has no say in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels import Objective, select
from dapo_kernels.objectives import ratio
from dapo_runner.types import PackedBatch


class Scores(NamedTuple):
    """What a choice goes by, of every position of one or more micro-batches; float32 [T] under the current policy."""

    logprobs: Tensor
    entropy: Tensor

    def to(self, device: torch.device | str) -> Scores:
        return Scores(self.logprobs.to(device), self.entropy.to(device))


def select_tokens(
    objective: Objective,
    batches: Sequence[PackedBatch],
    scores: Sequence[Scores],
    generator: torch.Generator,
    *,
    on_policy: bool = False,
) -> list[Tensor]:
    """For each micro-batch, which of its positions ``objective`` selects: bool [T], on the device of the scores.

    ``on_policy``: every ratio is 1, whatever old log-probs the micro-batches carry, but for those that are stale.
    ``generator``, of that device, draws the lots of clip_cov. Raises ValueError for an objective that selects nothing.
    """
    device = scores[0].logprobs.device
    order = _sequence_order(batches).to(device)

    def gather(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.to(device) for part in parts])[order]

    live = gather([batch.mask for batch in batches])
    logprobs = torch.where(live, gather([score.logprobs for score in scores]), 0.0)
    advantages = gather([batch.advantages for batch in batches])
    if objective.top_entropy is not None:
        entropy = gather([score.entropy for score in scores])
        chosen = select.top_entropy(entropy, live, objective.top_entropy)
    elif objective.kl_cov is not None:
        chosen = select.kl_cov(logprobs, advantages, live, objective.kl_cov)
    elif objective.clip_cov is not None:
        own = [on_policy and not batch.stale for batch in batches]
        old = gather(
            [s.logprobs if is_own else b.old_logprobs for b, s, is_own in zip(batches, scores, own, strict=True)]
        )
        hit = _clip_hit(objective, logprobs, old, advantages, live, gather(_sequence_ids(batches)))
        chosen = select.clip_cov(logprobs, advantages, live, hit, objective.clip_cov, generator)
    else:
        raise ValueError("select_tokens: expected an objective with top_entropy, clip_cov or kl_cov")
    in_packing_order = torch.empty_like(chosen)
    in_packing_order[order] = chosen
    return list(in_packing_order.split([batch.n_positions for batch in batches]))


def _clip_hit(
    objective: Objective, logprobs: Tensor, old: Tensor, advantages: Tensor, live: Tensor, sequence_ids: Tensor
) -> Tensor:
    """Which bound of the ratio clip stops a token already, 0 for none; int8 [N]. The arguments are [N] each, in the
    order of the sequences, whose places ``sequence_ids`` holds.
    """
    n_sequences = int(sequence_ids.max()) + 1
    log_ratio = ratio.log_ratio(objective, logprobs, old, advantages, live, sequence_ids, n_sequences)
    clipped = ratio.clipped_log_ratio(objective, logprobs, old, log_ratio)
    return select.clip_hits(objective, logprobs, clipped, advantages, live)


def _sequence_ids(batches: Sequence[PackedBatch]) -> list[Tensor]:
    """The sequence of every position, int64 [T] for each micro-batch."""
    return [batch.sequence_ids.repeat_interleave(batch.cu_seqlens.diff().to(torch.int64)) for batch in batches]


def _sequence_order(batches: Sequence[PackedBatch]) -> Tensor:
    """Where each position of the mini-batch, sequence by sequence, lies among those of all micro-batches."""
    return torch.cat(_sequence_ids(batches)).argsort(stable=True)
