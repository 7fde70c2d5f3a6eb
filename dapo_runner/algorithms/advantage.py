"""Advantages: each sample against a baseline, over a scale, the same for every token of a response; or those of its
segments (`segments.py`); or of every token, which the learner makes of the sample's reward once it has the log-probs
and values of the whole step.

With R the reward, G the samples of one prompt and N the samples of the whole step:

    group_std        (R − mean_G) / (std_G + 1e-6)
    group_mean       R − mean_G
    batch_std        (R − mean_G) / (std_N + 1e-6)
    batch_mean       R − mean_N
    batch_whitened   (R − mean_N) / (std_N + 1e-6)     over samples, not tokens
    leave_one_out    R − mean of the others in G

and per token, by the formulas of `dapo_runner.algorithms.returns`, whitened over the tokens of the step:

    gae              of R on the last token, with a critic's values
    returns          of R on the last token
    group_returns    of R − mean_G on the last token

Standard deviations are unbiased. Samples that overlong filtering took out of the loss still count in every mean and
standard deviation. A step may have been split or packed in any way: the formulas see whole groups and the whole step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dapo_runner.algorithms.returns import EPS
from dapo_runner.algorithms.segments import of_tokens
from dapo_runner.config import AdvantageConfig
from dapo_runner.types import Group, Sample, Sequence, TruncatedSupport


@dataclass(frozen=True, slots=True)
class Advantage:
    """What is taken off a reward, and what the rest is divided by."""

    baseline: Literal["group", "batch", "others"] | None
    scale: Literal["group", "batch"] | None = None
    paper: str = ""
    by_token: bool = False  # it gives the rewards that the tokens' advantages are made of

    def __call__(self, rewards: Tensor, batch: Tensor) -> Tensor:
        """Advantages [G] of one group's ``rewards`` [G]; ``batch`` [N] holds those of every group. float64."""
        n = rewards.numel()
        if self.baseline is None:
            return rewards
        if self.baseline == "others":
            centred = (rewards - rewards.mean()) * (n / (n - 1))
        else:
            centred = rewards - (rewards if self.baseline == "group" else batch).mean()
        if self.scale is None:
            return centred
        compared = rewards if self.scale == "group" else batch
        return centred / (compared.std(correction=min(1, compared.numel() - 1)) + EPS)  # of one sample 0

    def formula(self) -> str:
        """In words, for a plan."""
        mean = {"group": "mean of its group", "batch": "mean of the step", "others": "mean of the others in its group"}
        if self.baseline is None:
            return "R"
        if self.scale is None:
            return f"R − {mean[self.baseline]}"
        return (
            f"(R − {mean[self.baseline]}) / (std of {'its group' if self.scale == 'group' else 'the step'} + {EPS:g})"
        )


ADVANTAGES: dict[str, Advantage] = {
    "group_std": Advantage("group", "group", paper="GRPO, DAPO eq. 9, arXiv 2503.14476"),
    "group_mean": Advantage("group", paper="Dr.GRPO, arXiv 2503.20783"),
    "batch_std": Advantage("group", "batch", paper="LitePPO, arXiv 2508.08221"),
    "batch_mean": Advantage("batch", paper="REINFORCE with a baseline, Williams 1992"),
    "batch_whitened": Advantage("batch", "batch", paper="REINFORCE++, arXiv 2501.03262"),
    "leave_one_out": Advantage("others", paper="RLOO, arXiv 2402.14740"),
    "gae": Advantage(None, paper="PPO, arXiv 1707.06347; GAE, arXiv 1506.02438", by_token=True),
    "returns": Advantage(None, paper="REINFORCE++, arXiv 2501.03262", by_token=True),
    "group_returns": Advantage("group", paper="REINFORCE++ with baseline, arXiv 2501.03262", by_token=True),
}


def make_sequences(groups: Iterable[Group], config: AdvantageConfig, step: int = 0) -> list[Sequence]:
    """The training records of a step, group by group in order. ``step`` is the one that groups count their own by."""
    groups, advantage = list(groups), ADVANTAGES[config.kind]
    # float64: in float32 the mean of equal rewards such as -1.3 can leave a residue larger than EPS.
    rewards = [torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64) for group in groups]
    batch = torch.cat(rewards) if rewards else torch.empty(0, dtype=torch.float64)
    sequences: list[Sequence] = []
    for group_id, (group, own) in enumerate(zip(groups, rewards, strict=True)):
        parts: list[tuple[float | Tensor, Tensor | None]]
        if config.segments is not None:
            parts = [of_tokens(sample, config.segments) for sample in group.samples]
        else:
            parts = [(value, None) for value in advantage(own, batch).tolist()]
        made = [
            sequence_of(group, sample, value, group_id, step - group.step, trains)
            for sample, (value, trains) in zip(group.samples, parts, strict=True)
        ]
        sequences += [_earning(sequence) for sequence in made] if advantage.by_token else made
    return sequences


def _earning(sequence: Sequence) -> Sequence:
    """Its advantage as what its last token has earned."""
    reward = float(sequence.advantages[-1])
    return replace(sequence, advantages=torch.zeros_like(sequence.advantages), reward=reward)


def sequence_of(
    group: Group, sample: Sample, advantage: float | Tensor, group_id: int, age: int, trains: Tensor | None = None
) -> Sequence:
    """The training record of one sample with a response of N tokens. ``advantage``: one for all, or float32 [N].
    ``trains``, bool [N]: which tokens do; None: all, of a sample that does.
    """
    prompt = torch.tensor(group.prompt.token_ids, dtype=torch.int64)
    no_prompt, n = torch.zeros(prompt.numel()), sample.completion.length
    advantages = torch.as_tensor(advantage, dtype=torch.float32).expand(n)
    mask = torch.as_tensor(sample.trains if trains is None else trains).expand(n)
    if sample.completion.loss_mask is not None:
        mask = mask & sample.completion.loss_mask
    kept = sample.completion.support
    return Sequence(
        token_ids=torch.cat([prompt, sample.completion.token_ids.to(torch.int64)]),
        advantages=torch.cat([no_prompt, advantages]),
        mask=torch.cat([no_prompt.bool(), mask]),
        rollout_logprobs=torch.cat([no_prompt, sample.completion.logprobs.to(torch.float32)]),
        group_id=group_id,
        age=age,
        support=None if kept is None else TruncatedSupport.concatenate([TruncatedSupport.full(prompt.numel()), kept]),
    )
