"""Compute advantages of responses and make the training sequences of a step.

With R the reward, G the samples of one prompt and N the samples of the whole step:

    group_std        (R − mean_G) / (std_G + 1e-6)
    group_mean       R − mean_G
    batch_std        (R − mean_G) / (std_N + 1e-6)
    batch_mean       R − mean_N
    batch_whitened   (R − mean_N) / (std_N + 1e-6)     over samples, not tokens
    leave_one_out    R − mean of the others in G

and per token, by the formulas of `dapo_runner.algorithms.returns`:

    gae              from R on the last token and a critic's values
    returns          from R on the last token
    group_returns    from R − mean_G on the last token

Standard deviations are unbiased. Samples masked by overlong filtering count in means and standard deviations. Segments
of a response have their own advantages (`segments.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dapo_runner.algorithms.returns import EPS
from dapo_runner.algorithms.segments import segment_advantages
from dapo_runner.config import AdvantageConfig, ConfigError
from dapo_runner.errors import describe_error
from dapo_runner.plugins import import_function
from dapo_runner.types import Group, Sample, TrainingSequence, TruncatedSupport


class Advantage(NamedTuple):
    """The baseline that is subtracted from a reward, and the scale that divides the difference."""

    baseline: Literal["group", "batch", "others"] | None
    scale: Literal["group", "batch"] | None = None

    def __call__(self, rewards: Tensor, batch: Tensor) -> Tensor:
        """Return the advantages float64 [G] of a group's ``rewards`` [G]. ``batch`` [N]: the rewards of all groups."""
        n = rewards.numel()
        if self.baseline is None:
            return rewards
        if self.baseline == "others":
            centred = (rewards - rewards.mean()) * (n / max(1, n - 1))  # 0 for a single sample
        else:
            centred = rewards - (rewards if self.baseline == "group" else batch).mean()
        if self.scale is None:
            return centred
        compared = rewards if self.scale == "group" else batch
        return centred / (compared.std(correction=min(1, compared.numel() - 1)) + EPS)  # 0 for a single sample


ADVANTAGES: dict[str, Advantage] = {
    "group_std": Advantage("group", "group"),  # GRPO, DAPO eq. 9, arXiv 2503.14476
    "group_mean": Advantage("group"),  # Dr.GRPO, arXiv 2503.20783
    "batch_std": Advantage("group", "batch"),  # LitePPO, arXiv 2508.08221
    "batch_mean": Advantage("batch"),  # REINFORCE with a baseline, Williams 1992
    "batch_whitened": Advantage("batch", "batch"),  # REINFORCE++, arXiv 2501.03262
    "leave_one_out": Advantage("others"),  # RLOO, arXiv 2402.14740
    "gae": Advantage(None),  # PPO, arXiv 1707.06347; GAE, arXiv 1506.02438
    "returns": Advantage(None),  # REINFORCE++, arXiv 2501.03262
    "group_returns": Advantage("group"),  # REINFORCE++ with baseline, arXiv 2501.03262
}


def make_sequences(groups: Iterable[Group], config: AdvantageConfig, step: int = 0) -> list[TrainingSequence]:
    """Return the training sequences of a step, in the order of their groups. ``step`` is the number of this step.
    Raises ConfigError if a custom function raises, or does not return an advantage for each sample.
    """
    groups, segments = list(groups), config.segments
    if segments is not None:
        rows: Iterable[Iterable[Any]] = [[segment_advantages(x, segments) for x in group.samples] for group in groups]
    elif config.kind in ADVANTAGES:
        rows = [[(x, None) for x in row] for row in _named_advantages(groups, ADVANTAGES[config.kind])]
    else:
        rows = [[(x, None) for x in row] for row in _plugin_advantages(groups, config.kind)]
    sequences = [
        make_sequence(group, sample, advantage, group_id, step - group.step, trains)
        for group_id, (group, row) in enumerate(zip(groups, rows, strict=True))
        for sample, (advantage, trains) in zip(group.samples, row, strict=True)
    ]
    if not config.by_token:
        return sequences
    # The trainer turns the reward of the last token into advantages.
    return [replace(x, advantages=torch.zeros_like(x.advantages), reward=float(x.advantages[-1])) for x in sequences]


def _named_advantages(groups: Sequence[Group], advantage: Advantage) -> list[list[float]]:
    # float64: in float32 the mean of equal rewards such as -1.3 can leave a residue larger than EPS.
    rewards = [torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64) for group in groups]
    batch = torch.cat(rewards) if rewards else torch.empty(0, dtype=torch.float64)
    return [advantage(row, batch).tolist() for row in rewards]


def _plugin_advantages(groups: Sequence[Group], name: str) -> list[list[Tensor]]:
    """Return the advantages of a custom function: for each sample one, or one for each of its tokens."""
    function = import_function("advantage.kind", name)
    try:
        returned = function(groups)
        found = list(returned) if hasattr(returned, "__iter__") else []
    except Exception as error:
        raise ConfigError(f"advantage.kind: {name} raised {describe_error(error)}") from error
    wanted = [len(group.samples) for group in groups]
    sizes = [len(row) if hasattr(row, "__len__") else row for row in found]
    if sizes != wanted:
        raise ConfigError(f"advantage.kind: expected lists of {wanted} advantages from {name}, got lists of {sizes}")
    return [
        [_check_advantages(name, value, sample) for sample, value in zip(group.samples, row, strict=True)]
        for group, row in zip(groups, found, strict=True)
    ]


def _check_advantages(name: str, value: Any, sample: Sample) -> Tensor:
    length = sample.completion.length
    try:
        advantages = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        advantages = torch.tensor(float("nan"))
    if advantages.shape not in ((), (length,)) or not advantages.isfinite().all():
        raise ConfigError(
            f"advantage.kind: expected a finite number from {name} for each response, or for each of its {length} "
            f"tokens, got {value!r}"
        )
    return advantages


def make_sequence(
    group: Group, sample: Sample, advantage: float | Tensor, group_id: int, age: int, trains: Tensor | None = None
) -> TrainingSequence:
    """Return the training sequence of a sample with a response of N tokens.

    Args:
        advantage: one for all tokens, or float32 [N].
        trains: bool [N], the tokens that train; None for all tokens of a sample that trains.
    """
    prompt = torch.tensor(group.prompt.token_ids, dtype=torch.int64)
    completion, zeros, n = sample.completion, torch.zeros(prompt.numel()), sample.completion.length
    mask = torch.as_tensor(sample.trains if trains is None else trains).expand(n)
    logprobs = completion.logprobs.to(torch.float32)
    if completion.loss_mask is not None:
        mask = mask & completion.loss_mask
        logprobs = logprobs.where(completion.loss_mask, 0.0)  # NaN would count as missing in the engine
    support = completion.support
    if support is not None:
        support = TruncatedSupport.concatenate([TruncatedSupport.full(prompt.numel()), support])
    return TrainingSequence(
        token_ids=torch.cat([prompt, completion.token_ids.to(torch.int64)]),
        advantages=torch.cat([zeros, torch.as_tensor(advantage, dtype=torch.float32).expand(n)]),
        mask=torch.cat([zeros.bool(), mask]),
        rollout_logprobs=torch.cat([zeros, logprobs]),
        group_id=group_id,
        age=age,
        support=support,
        experts=completion.experts,
    )
