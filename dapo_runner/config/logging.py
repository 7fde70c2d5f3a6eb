"""The settings of what is shown and kept of a run."""

from __future__ import annotations

from typing import Literal

from dapo_runner.config.section import NonNegativeInt, PositiveFloat, Section


class RolloutLogConfig(Section):
    """Which responses are kept for `dapo show`."""

    groups: NonNegativeInt | None = 32  # of each step, the first in the order of their prompts; None: all, 0: none
    max_gb: PositiveFloat = 1.0  # all steps together, compressed; beyond it the oldest steps are removed


class TrainingLogConfig(RolloutLogConfig):
    """And how much of those that are trained on."""

    per_token: bool = False  # also their tokens, each with its log-probs, entropy, ratio and what the loss made of it


class WandbConfig(Section):
    project: str = "dapo"
    entity: str | None = None  # None: that of the login
    mode: Literal["online", "offline"] = "online"  # offline: written to the run's folder; `wandb sync` sends it later


class MLflowConfig(Section):
    experiment: str = "dapo"
    tracking_uri: str | None = None  # None: MLflow's own default


class TrackioConfig(Section):
    project: str = "dapo"
    space: str | None = None  # a Hugging Face Space to log to; None: this machine


class LoggingConfig(Section):
    progress: Literal["auto", "live", "plain", "off"] = "auto"  # auto: live on a terminal, else plain lines
    rollouts: TrainingLogConfig = TrainingLogConfig()
    evaluations: RolloutLogConfig = RolloutLogConfig(groups=None)  # the answers to held-out problems
    tensorboard: bool = False
    wandb: WandbConfig | None = None
    mlflow: MLflowConfig | None = None
    trackio: TrackioConfig | None = None
    samples: NonNegativeInt = 8  # of each step and evaluation, in the trackers' tables; 0: no tables
