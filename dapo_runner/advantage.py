"""Advantages: each sample against the others of its group, the same for every token of a response.

    group_std    A = (R − mean)/(std + eps), unbiased std: GRPO, DAPO Eq. 9 (arXiv 2503.14476)
    group_mean   A = R − mean: Dr.GRPO (arXiv 2503.20783)

Samples that overlong filtering took out of the loss still count in the group's mean and std.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dapo_runner.config import AdvantageConfig
from dapo_runner.types import Group, Sample, Sequence

AdvantageFunction = Callable[[Tensor, float], Tensor]
"""From the rewards of a group, float64 [G], and eps to its advantages, float64 [G]."""


def group_std(rewards: Tensor, eps: float) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + eps)


def group_mean(rewards: Tensor, eps: float) -> Tensor:
    return rewards - rewards.mean()


ADVANTAGES: dict[str, AdvantageFunction] = {"group_std": group_std, "group_mean": group_mean}


def make_sequences(groups: Iterable[Group], config: AdvantageConfig) -> list[Sequence]:
    """The training records of a step, group by group in order."""
    advantage = ADVANTAGES[config.kind]
    sequences: list[Sequence] = []
    for group_id, group in enumerate(groups):
        # float64: in float32 the mean of equal rewards such as -1.3 can leave a residue larger than eps.
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        advantages = advantage(rewards, config.eps).tolist()
        sequences += [
            _sequence(group, sample, value, group_id) for sample, value in zip(group.samples, advantages, strict=True)
        ]
    return sequences


def _sequence(group: Group, sample: Sample, advantage: float, group_id: int) -> Sequence:
    prompt = torch.tensor(group.prompt.token_ids, dtype=torch.int64)
    n_prompt, n_response = prompt.numel(), sample.completion.length
    no_prompt = torch.zeros(n_prompt)
    mask = torch.zeros(n_prompt + n_response, dtype=torch.bool)
    mask[n_prompt:] = sample.trains
    return Sequence(
        token_ids=torch.cat([prompt, sample.completion.token_ids.to(torch.int64)]),
        advantages=torch.cat([no_prompt, torch.full((n_response,), advantage)]),
        mask=mask,
        rollout_logprobs=torch.cat([no_prompt, sample.completion.logprobs.to(torch.float32)]),
        group_id=group_id,
    )
