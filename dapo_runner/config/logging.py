"""The settings of what is shown and kept of a run."""

from __future__ import annotations

from typing import Literal

from dapo_runner.config.section import NonNegativeInt, Section


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
