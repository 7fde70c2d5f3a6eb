"""The settings of a run: how long, where, what is saved and shown of it, when it ends early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from dapo_runner.config.section import Check, NonNegativeInt, PositiveFloat, PositiveInt, Section
from dapo_runner.config.training import ModelConfig, OptimizerConfig, ParallelConfig


class EarlyStopConfig(Section):
    """Ends a run by a figure of its evaluations. It goes by `metrics.jsonl` alone."""

    metric: str | None = None  # as logged, less its eval/; null: avg@k
    mode: Literal["max", "min"] = "max"  # whether larger or smaller is better
    patience: PositiveInt | None = 5  # evaluations in a row without a better one; null: any number
    target: float | None = None  # good enough

    def checks(self) -> Iterator[Check]:
        yield "patience", self.patience is not None or self.target is not None, "a number, or a target"


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

    def checks(self) -> Iterator[Check]:
        run, _, step = (self.from_ or "run@0").rpartition("@")
        yield "from_", bool(run and step.isdecimal()), "RUN@STEP, a run's folder and a step it has a checkpoint of"


class RolloutLogConfig(Section):
    """Which responses are kept for `dapo show`: of each step, and of each evaluation."""

    groups: NonNegativeInt | None = 32  # the first in the order of their prompts; null: all, 0: none
    per_token: bool = False  # also the tokens trained on, each with its log-probs, entropy, ratio and clip


class LoggingConfig(Section):
    requires = {"rollout.group_size": "rollouts samples"}  # not in dapo sft, which has no rollouts

    progress: Literal["auto", "live", "plain", "off"] = "auto"  # auto: live on a terminal, else plain lines
    rollouts: RolloutLogConfig = RolloutLogConfig()
    # where metrics are sent besides the run's folder
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    project: str = "dapo"  # of the trackers, for MLflow the experiment
    samples: NonNegativeInt = 8  # of each step and evaluation, in the trackers' tables; 0: no tables


class TrainingConfig(Section):
    """The sections that `dapo train` and `dapo sft` share."""

    run: JobConfig = JobConfig()
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name
