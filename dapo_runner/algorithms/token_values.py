"""What an update made of single tokens, for people to look at: `logging.rollouts.per_token`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_kernels import Objective, select
from dapo_kernels.objectives import ratio
from dapo_runner.algorithms.selection import Scores
from dapo_runner.types import PackedBatch

HIGH_ENTROPY = 0.2  # of the training tokens; the share of Wang et al. 2025, which the objective top_entropy trains on


@dataclass(frozen=True, slots=True, eq=False)
class TokenValues:
    """Of one sequence of L tokens, under the policy that its update began with; on the CPU. Where a position does not
    train they mean nothing.

    logprobs, entropy, ratio float32 [L−1], the ratio as the objective takes it: of the token or of the sequence.
    clip_hit int8 [L−1]: which bound of the ratio it hits, as `dapo_kernels.objectives.surrogate` counts them.
    high_entropy bool [L−1]: among the fifth of its mini-batch with the highest entropy, or the objective's own share.
    selected bool [L−1]: by an objective that looks at the whole mini-batch; None for any other.
    """

    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    clip_hit: Tensor
    high_entropy: Tensor
    selected: Tensor | None


def token_values(
    objective: Objective,
    batches: Sequence[PackedBatch],
    scores: Sequence[Scores],
    selections: Sequence[Tensor | None],
    *,
    on_policy: bool,
    groups: int | None,
) -> dict[int, TokenValues]:
    """Of the sequences in the first ``groups`` groups of a step (None: of all), by their places in the list that was
    packed. Scores and selections are those of the mini-batch's update; ``on_policy`` as in `select_tokens`.
    """
    if objective.top_entropy is None:
        live = torch.cat([batch.mask for batch in batches])
        entropy = torch.cat([score.entropy.to(live.device) for score in scores])
        high = select.top_entropy(entropy, live, HIGH_ENTROPY).split([batch.n_positions for batch in batches])
    else:
        high = [chosen for chosen in selections if chosen is not None]
    values = {}
    for batch, score, chosen, high_entropy in zip(batches, scores, selections, high, strict=True):
        columns = _columns(objective, batch, score, on_policy and not batch.stale)
        columns |= {"high_entropy": high_entropy} | ({} if chosen is None else {"selected": chosen})
        lengths = batch.cu_seqlens.diff().tolist()
        parts = {name: column.cpu().split(lengths) for name, column in columns.items()}
        for place, (index, group) in enumerate(zip(batch.sequence_ids.tolist(), batch.group_ids.tolist(), strict=True)):
            if group >= 0 and (groups is None or group < groups):
                values[index] = TokenValues(**{"selected": None} | {name: part[place] for name, part in parts.items()})
    return values


def _columns(objective: Objective, batch: PackedBatch, scores: Scores, on_policy: bool) -> dict[str, Tensor]:
    device, logprobs = scores.logprobs.device, scores.logprobs
    live = batch.mask.to(device)
    lengths = batch.cu_seqlens.diff().to(device, torch.int64)
    ids = torch.arange(batch.n_sequences, device=device).repeat_interleave(lengths)
    old = None if on_policy else batch.old_logprobs.to(device)
    advantages = batch.advantages.to(device)
    log_ratio = ratio.log_ratio(objective, logprobs, old, advantages, live, ids, batch.n_sequences)
    clipped = ratio.clipped_log_ratio(objective, logprobs, old, log_ratio)
    return {
        "logprobs": logprobs,
        "entropy": scores.entropy,
        "ratio": torch.ones_like(logprobs) if log_ratio is None else log_ratio.exp(),
        "clip_hit": select.clip_hits(objective, logprobs, clipped, advantages, live),
    }
