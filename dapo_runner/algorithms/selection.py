"""Select tokens over a whole mini-batch, and collect what an update computed per token.

The selection is over all training tokens of the mini-batch, in the order of its sequences. So it does not depend on how
the mini-batch is split and packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels import Objective, select
from dapo_kernels.objectives import ratio
from dapo_runner.types import PackedBatch

HIGH_ENTROPY = 0.2  # share of the training tokens in Wang et al. 2025, also of the objective top_entropy


class ScoredBatch(NamedTuple):
    """A micro-batch with log-probs and entropies of its positions under the current policy, float32 [T]."""

    batch: PackedBatch
    logprobs: Tensor
    entropy: Tensor

    def to(self, device: torch.device | str) -> ScoredBatch:
        """Move the scores to a device. The batch stays on the CPU."""
        return ScoredBatch(self.batch, self.logprobs.to(device), self.entropy.to(device))


def select_tokens(
    objective: Objective, scored: Sequence[ScoredBatch], generator: torch.Generator, *, on_policy: bool = False
) -> list[Tensor]:
    """Return for each micro-batch the positions that ``objective`` selects, bool [T], on the device of the scores.

    Args:
        generator: random numbers for clip_cov, on the same device.
        on_policy: all ratios are 1, except in stale micro-batches.
    """
    device = scored[0].logprobs.device
    ids = [one.batch.sequence_ids.repeat_interleave(one.batch.cu_seqlens.diff().long()) for one in scored]
    order = torch.cat(ids).argsort(stable=True).to(device)  # the positions of the mini-batch, sequence by sequence

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.to(device) for tensor in tensors])[order]

    mask = gather([one.batch.mask for one in scored])
    logprobs = torch.where(mask, gather([one.logprobs for one in scored]), 0.0)
    advantages = gather([one.batch.advantages for one in scored])
    if objective.top_entropy is not None:
        chosen = select.top_entropy(gather([one.entropy for one in scored]), mask, objective.top_entropy)
    elif objective.kl_cov is not None:
        chosen = select.kl_cov(logprobs, advantages, mask, objective.kl_cov)
    else:
        assert objective.clip_cov is not None
        hits = gather([ratio_and_clip(objective, one, on_policy=on_policy)[1] for one in scored])
        chosen = select.clip_cov(logprobs, advantages, mask, hits, objective.clip_cov, generator)
    in_packing_order = torch.empty_like(chosen)
    in_packing_order[order] = chosen
    return list(in_packing_order.split([one.batch.n_positions for one in scored]))


def ratio_and_clip(objective: Objective, scored: ScoredBatch, *, on_policy: bool) -> tuple[Tensor, Tensor]:
    """Return the objective's ratio at each position, float32 [T], and which clip bound it hits, int8 [T]; 0 is none."""
    batch, logprobs = scored.batch, scored.logprobs
    device = logprobs.device
    mask, advantages = batch.mask.to(device), batch.advantages.to(device)
    ids = torch.arange(batch.n_sequences).repeat_interleave(batch.cu_seqlens.diff().long()).to(device)
    old = None if on_policy and not batch.stale else batch.old_logprobs.to(device)
    log_ratio = ratio.log_ratio(objective, logprobs, old, advantages, mask, ids, batch.n_sequences)
    clipped = ratio.clipped_log_ratio(objective, logprobs, old, log_ratio)
    hits = select.clip_hits(objective, logprobs, clipped, advantages, mask)
    return torch.ones_like(logprobs) if log_ratio is None else log_ratio.exp(), hits


class TokenValues(NamedTuple):
    """What an update computed for one sequence before it changed the policy; [L−1] on the CPU, by target.

    Values at positions that do not train have no meaning.
    """

    logprobs: Tensor  # float32
    entropy: Tensor  # float32
    ratio: Tensor  # float32, the objective's ratio, of the token or of the sequence
    clip_hit: Tensor  # int8, the bound that the ratio hits, numbered as in `dapo_kernels.objectives.surrogate`
    high_entropy: Tensor  # bool: in the top share of entropies, HIGH_ENTROPY or the objective's share
    selected: Tensor | None  # bool: selected by an objective that looks at the whole mini-batch


def token_values(
    objective: Objective, updated: Sequence[tuple[ScoredBatch, Tensor | None]], *, on_policy: bool, groups: int | None
) -> dict[int, TokenValues]:
    """Return the values of the sequences in the first ``groups`` groups of a step (None: all), by ``sequence_ids``.

    ``updated`` has the micro-batches of an update and their selections.
    """
    found, scored, high = {}, [one for one, _ in updated], [chosen for _, chosen in updated]
    if objective.top_entropy is None:
        mask, entropy = torch.cat([x.batch.mask for x in scored]), torch.cat([x.entropy for x in scored])
        high = list(select.top_entropy(entropy, mask, HIGH_ENTROPY).split([x.batch.n_positions for x in scored]))
    for (one, chosen), high_entropy in zip(updated, high, strict=True):
        batch = one.batch
        ratios, clip_hit = ratio_and_clip(objective, one, on_policy=on_policy)
        columns = (one.logprobs, one.entropy, ratios, clip_hit, high_entropy, chosen)
        parts = [[None] * batch.n_sequences if x is None else x.split(batch.lengths) for x in columns]
        for index, group, *values in zip(batch.sequence_ids.tolist(), batch.group_ids.tolist(), *parts, strict=True):
            if group >= 0 and (groups is None or group < groups):
                found[index] = TokenValues(*values)
    return found
