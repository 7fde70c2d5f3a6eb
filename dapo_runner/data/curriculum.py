"""Choose which training prompts a step may use. A curriculum skips prompts; the order stays that of the seed.

With `column` the prompts are ordered by a number in each row. Step s uses the easiest share of them,
start + (1 − start)·(s − 1)/steps, including all prompts as difficult as the last of these. From step `steps` + 1 on it
uses all prompts.

Without `column`, a prompt is skipped for `rest` epochs after its samples were all correct or all incorrect, or with
`filter_groups: reward` had equal rewards. Earlier groups do not count, because the policy has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dapo_runner.config.rollout import CurriculumConfig, SamplerConfig
from dapo_runner.errors import ConfigError
from dapo_runner.types import Group, Prompt


class Curriculum:
    """Admit every prompt."""

    def admits(self, prompt: Prompt, step: int, epoch: int) -> bool:
        """Return whether to use a prompt in a rollout step (from 1) of an epoch (from 0). Each prompt is used later."""
        return True

    def observe(self, group: Group, epoch: int) -> None:
        """Record a scored group of a prompt that was admitted in that epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state. It is empty if the run had no curriculum before."""


def make_curriculum(sampler: SamplerConfig, prompts: list[Prompt]) -> Curriculum:
    """Return the curriculum. Raises ConfigError if a training row has no difficulty."""
    if (config := sampler.curriculum) is None:
        return Curriculum()
    by = sampler.filter_groups or "correctness"
    return ByLatestGroup(config.rest, by) if config.column is None else ByColumn(config.column, config, prompts)


class ByColumn(Curriculum):
    def __init__(self, column: str, config: CurriculumConfig, prompts: list[Prompt]) -> None:
        self.config = config
        self.difficulty = {prompt.id: _number(prompt, column) for prompt in prompts}
        self.ordered = sorted(self.difficulty.values())
        self.limit = lru_cache(1)(self._limit)  # a step may pass many prompts

    def admits(self, prompt: Prompt, step: int, epoch: int) -> bool:
        return self.difficulty[prompt.id] <= self.limit(step)

    def _limit(self, step: int) -> float:
        start = Fraction(str(self.config.start))  # exact: in floats 0.55 of 100 is 55.000000000000007
        share = min(Fraction(1), start + (1 - start) * Fraction(step - 1, self.config.steps))
        return self.ordered[math.ceil(share * len(self.ordered)) - 1]


def _number(prompt: Prompt, column: str) -> float:
    value = prompt.row.get(column)
    with suppress(TypeError, ValueError):
        if math.isfinite(number := float(value)):  # type: ignore[arg-type]
            return number
    raise ConfigError(
        f"sampler.curriculum.column: expected a number in the column {column!r} of every training row, got "
        f"{value!r} in the row of {prompt.text[:80]!r}"
    )


class ByLatestGroup(Curriculum):
    def __init__(self, rest: int, varying: str) -> None:
        self.rest, self.varying = rest, varying
        self.due: dict[str, int] = {}  # the epoch in which a skipped prompt is used again

    def admits(self, prompt: Prompt, step: int, epoch: int) -> bool:
        return epoch >= self.due.get(prompt.id, 0)

    def observe(self, group: Group, epoch: int) -> None:
        self.due.pop(group.prompt.id, None)  # of an earlier group, where a round has a prompt twice
        if not group.varies_in(self.varying):
            self.due[group.prompt.id] = epoch + 1 + self.rest

    def state_dict(self) -> dict[str, Any]:
        return {"due": dict(self.due)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.due = dict(state.get("due", {}))
