"""TensorBoard and Weights & Biases, each by a switch in `logging`. They are given what the JSONL logs hold, numbers
only; the logs stay the truth, and a run goes the same way with or without them.
"""

from __future__ import annotations

import importlib.util
import math
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from dapo_runner.config import Config, ConfigError, LoggingConfig

TENSORBOARD = "tensorboard"
WANDB = "wandb"
WANDB_ID = "wandb-id.txt"  # a run that is resumed goes on under the same id


class Tracker(Protocol):
    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Event files under the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """What an interrupted run had written of ``first_step`` and later no longer shows."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for key, value in _finite(figures).items():
            self.writer.add_scalar(key.replace("@", "_at_"), value, step)  # TensorBoard's names know no @
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """One W&B run for the run's whole life, resumed with it. Steps done again after a resume are logged again."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Raises ConfigError where W&B cannot start, for instance without a login."""
        import wandb

        settings = config.logging.wandb
        assert settings is not None
        try:
            self.run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=config.run.name,
                id=_wandb_id(folder),
                resume="allow",
                dir=str(folder),
                mode=settings.mode,
                config=config.model_dump(mode="json", by_alias=True),
                settings=wandb.Settings(silent=True, console="off"),  # its lines would tear the live display
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"logging.wandb: {reason} (`wandb login`, or logging.wandb.mode=offline)") from error
        # W&B's own step must never go back, which is what a resume does.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log({**_finite(figures), "step": step})

    def close(self) -> None:
        self.run.finish()


def check_trackers(config: LoggingConfig) -> None:
    """Raises ConfigError when a package that `logging` asks for is missing."""
    wanted = ((TENSORBOARD, config.tensorboard), (WANDB, config.wandb is not None))
    for name, enabled in wanted:
        if enabled and importlib.util.find_spec(name) is None:
            raise ConfigError(f"logging.{name}: needs the package {name}; pip install 'dapo-kernels[{name}]'")


def open_trackers(config: Config, folder: Path, first_step: int) -> list[Tracker]:
    """Those that the configuration asks for. ``first_step`` is the first that will be written. Raises ConfigError."""
    check_trackers(config.logging)
    trackers: list[Tracker] = []
    if config.logging.tensorboard:
        trackers.append(TensorBoardTracker(folder / TENSORBOARD, first_step))
    if config.logging.wandb is not None:
        trackers.append(WandbTracker(folder, config))
    return trackers


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Neither draws what is not finite; the JSONL log has it as null."""
    return {key: float(value) for key, value in figures.items() if math.isfinite(value)}


def _wandb_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
