"""The settings of dynamic sampling: which prompts are asked when, which groups are kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dapo_runner.config.section import NonNegativeInt, PositiveInt, Section, Share


class CurriculumConfig(Section):
    """Which training prompts are asked when: dapo_runner.data.curriculum."""

    requires = {"by=column": "column start steps", "by=pass_rate": "rest"}

    by: Literal["column", "pass_rate"]  # a column of the data, or the pass rate so far
    column: str = "difficulty"  # by column: a number in every row, larger where it is harder
    start: Share = 0.25  # by column: the easiest share of the prompts that a run begins with
    steps: PositiveInt = 100  # by column: rollout steps after which all prompts are in play
    rest: PositiveInt = 2  # by pass_rate: epochs that a prompt rests whose samples were all correct, or all incorrect


class SamplerConfig(Section):
    requires = {"!advantage.segments": "oversample", "filter_groups": "filter_on"}

    prompts_per_step: PositiveInt = 512  # accepted groups in a step
    filter_groups: bool = True  # dynamic sampling; False trains on every group
    # What accepts a group: correct and incorrect samples, or rewards that vary (without the length term).
    filter_on: Literal["correctness", "reward"] | None = None  # null: reward with reward.parts, else correctness
    initial_acceptance: Share = 1 / 3  # share of groups expected to be mixed before any were seen (paper: 1536 for 512)
    max_rounds: PositiveInt = 10  # generation rounds per step
    # server: prompts asked for each that is needed. What still runs once the needed are answered is dropped.
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    # Steps old that a group may be when it trains; older ones are dropped and counted. null: rollout.max_staleness + 1
    max_age: NonNegativeInt | None = None
    # after max_rounds: stop, or train on the groups there are
    on_exhausted: Literal["train_partial", "error"] = "error"
    curriculum: CurriculumConfig | None = None  # null: all prompts, in a new order every epoch
