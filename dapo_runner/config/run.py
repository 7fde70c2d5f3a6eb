"""The settings of a run: length, folder, checkpoints, logging, early stopping."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, ConfigDict, Field, PositiveFloat

from dapo_runner.config.section import Check, Int, LocalPath, MayChange, NonNegativeInt, PositiveInt, Section
from dapo_runner.config.training import ModelConfig, OptimizerConfig, ParallelConfig


def _check_name(name: str) -> str:
    if not name.rstrip("/").rpartition("/")[2].strip("."):
        raise ValueError(f"expected the name of a folder, not . or .., got {name!r}")
    return name


RunName = Annotated[str, AfterValidator(_check_name)]


class EarlyStopConfig(Section):
    """End a run by a metric of its evaluations, as logged in `metrics.jsonl`. Larger values are better."""

    metric: str | None = None  # its name in metrics.jsonl without eval/; null: avg@k. Graded rewards: reward
    patience: PositiveInt | None = 10  # stop after this many evaluations without a new best; null: never
    target: float | None = None  # stop once the metric reaches this value

    def checks(self) -> Iterator[Check]:
        yield "patience", self.patience is not None or self.target is not None, "a number, or a target"


def is_cuda(device: str) -> bool:
    """Return whether `run.device` is a GPU here. It may name one that does not exist."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


class JobConfig(Section):
    """The settings that `dapo train` and `dapo sft` share."""

    name: MayChange[RunName] = "dapo"  # name of the run's folder
    output_dir: MayChange[LocalPath] = Path("runs")  # the run lives in output_dir/name
    seed: NonNegativeInt = 0  # of training; problems, the held-out split and evaluations do not depend on it
    eval_every: MayChange[NonNegativeInt] = 5  # steps; 0: only before the first and after the last step
    save_every: MayChange[NonNegativeInt] = 5  # steps; 0: only after the last step
    keep: MayChange[PositiveInt] = 2  # checkpoints kept; older ones are removed
    device: MayChange[str] = "auto"  # auto: cuda if available, else cpu
    # seconds from SIGTERM to the kill: a step that would take longer is abandoned. Exceptions: docs/cluster.md
    grace: MayChange[PositiveFloat] = 20.0
    threads: MayChange[Annotated[Int, Field(gt=0, le=1024)] | None] = None  # CPU threads; null: PyTorch's default


class RunConfig(JobConfig):
    requires = {"run.eval_every": "early_stop"}

    model_config = ConfigDict(populate_by_name=True)

    # rollout steps; one pass over the data takes at most its prompts / `sampler.prompts_per_step`
    steps: MayChange[PositiveInt] = 320
    # end after the step that reaches this many generated tokens; null: off
    max_tokens: MayChange[PositiveInt | None] = None
    async_save: MayChange[bool] = False  # write checkpoints in the background, from a copy in memory
    early_stop: MayChange[EarlyStopConfig | None] = None  # end the run by its evaluations; null: off
    # RUN@STEP: start from the checkpoint of that step in another run's folder
    from_: str | None = Field(default=None, alias="from")

    @property
    def forked_at(self) -> int:
        """The step of the checkpoint in `run.from`; 0 without it."""
        return 0 if self.from_ is None else int(self.from_.rpartition("@")[2])

    def checks(self) -> Iterator[Check]:
        run, _, step = (self.from_ or "run@0").rpartition("@")
        yield "from_", bool(run and step.isdecimal()), "RUN@STEP, a run's folder and a step it has a checkpoint of"


class RolloutLogConfig(Section):
    """Which responses of each step and each evaluation are saved for `dapo show`. Trackers get the first 8 groups."""

    groups: NonNegativeInt | None = 32  # save the first groups in the order of their prompts; null: all, 0: none
    per_token: bool = False  # also save each trained token with its log-probs, entropy, ratio and clip


class LoggingConfig(Section):
    requires = {"rollout.group_size": "rollouts"}  # dapo sft has no rollouts

    progress: Literal["auto", "live", "plain", "off"] = "auto"  # auto: live in a terminal, else plain
    rollouts: RolloutLogConfig = RolloutLogConfig()
    # trackers that also receive the metrics
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    project: str = "dapo"  # project in the trackers; for MLflow the experiment


class TrainingConfig(Section):
    """The sections that `dapo train` and `dapo sft` share."""

    run: JobConfig = JobConfig()
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: MayChange[ParallelConfig] = ParallelConfig()
    logging: MayChange[LoggingConfig] = LoggingConfig()

    @property
    def run_dir(self) -> Path:
        return self.run.output_dir / self.run.name
