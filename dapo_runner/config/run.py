"""The settings of a run: how long, where, what is saved of it, when it ends early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from dapo_runner.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section


class EarlyStopConfig(Section):
    """Ends a run by a figure of its evaluations. It goes by `metrics.jsonl` alone."""

    metric: str | None = None  # as logged, less its eval/; null: avg@k
    mode: Literal["max", "min"] = "max"  # whether larger or smaller is better
    patience: PositiveInt | None = 5  # evaluations in a row without a better one; null: any number
    target: float | None = None  # good enough

    @model_validator(mode="after")
    def _ends_somehow(self) -> EarlyStopConfig:
        if self.patience is None and self.target is None:
            raise ValueError("expected patience, target or both, got neither")
        return self


class JobConfig(Section):
    """The settings that `dapo train` and `dapo sft` share."""

    name: str = "dapo"  # of the run's folder
    output_dir: Path = Path("runs")  # the run lives in output_dir/name
    seed: NonNegativeInt = 0  # of everything that is drawn
    eval_every: NonNegativeInt = 5  # steps; 0: only before the first and after the last one
    save_every: NonNegativeInt = 5  # steps; 0: only after the last one
    keep: PositiveInt = 2  # checkpoints kept; older ones are removed
    device: str = "auto"  # auto: cuda where there is one, else cpu
    grace: PositiveFloat = 20.0  # seconds from SIGTERM to the kill: a step that takes longer is given up
    threads: PositiveInt | None = None  # CPU threads; null: torch's choice


class RunConfig(JobConfig):
    requires = {"run.eval_every": "early_stop"}

    model_config = ConfigDict(populate_by_name=True)

    steps: PositiveInt = 320  # rollout steps
    max_tokens: PositiveInt | None = None  # end with the step by which as many were generated; null: no such end
    async_save: bool = False  # train while a checkpoint is written, on a copy of its content
    early_stop: EarlyStopConfig | None = None  # end the run by its evaluations; null: after run.steps
    # RUN@STEP: start from that checkpoint of another run's folder
    from_: str | None = Field(default=None, alias="from")

    @property
    def forked_at(self) -> int:
        """The step that the run starts after: that of its fork, or 0."""
        return 0 if self.from_ is None else int(self.from_.rpartition("@")[2])

    @field_validator("from_")
    @classmethod
    def _run_and_step(cls, value: str | None) -> str | None:
        if value is not None and re.fullmatch(r".+@\d+", value) is None:
            raise ValueError(f"expected RUN@STEP, a run's folder and a step it has a checkpoint of, got {value!r}")
        return value
