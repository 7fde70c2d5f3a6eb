"""What an update computed of single tokens, for people to look at: `logging.rollouts.per_token`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dapo_kernels import Objective, select
from dapo_runner.algorithms.selection import ScoredBatch, ratio_and_clip

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
    scored: Sequence[ScoredBatch],
    selections: Sequence[Tensor | None],
    *,
    on_policy: bool,
    groups: int | None,
) -> dict[int, TokenValues]:
    """Return the values of the sequences in the first ``groups`` groups of a step (None: of all), by their indices in
    the list that was packed. Scores and selections are those of the mini-batch's update.
    """
    found = {}
    high = selections if objective.top_entropy is not None else _high_entropy(scored)
    for one, chosen, high_entropy in zip(scored, selections, high, strict=True):
        batch = one.batch
        ratio, clip_hit = ratio_and_clip(objective, one, on_policy=on_policy)
        columns = (one.logprobs, one.entropy, ratio, clip_hit, high_entropy, chosen)
        parts = [[None] * batch.n_sequences if x is None else x.cpu().split(batch.lengths) for x in columns]
        for index, group, *values in zip(batch.sequence_ids.tolist(), batch.group_ids.tolist(), *parts, strict=True):
            if group >= 0 and (groups is None or group < groups):
                found[index] = TokenValues(*values)
    return found


def _high_entropy(scored: Sequence[ScoredBatch]) -> Sequence[Tensor]:
    mask = torch.cat([one.batch.mask for one in scored])
    entropy = torch.cat([one.entropy.to(mask.device) for one in scored])
    return select.top_entropy(entropy, mask, HIGH_ENTROPY).split([one.batch.n_positions for one in scored])
