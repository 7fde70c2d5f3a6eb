"""TensorBoard, Weights & Biases, MLflow and trackio, each by a switch in `logging`. They are given the figures of the
JSONL logs, tables of samples, the configuration and the environment. The logs stay the truth, and a run goes the same
way with or without them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dapo_runner.config import Config, ConfigError, LoggingConfig, SftConfig, flatten
from dapo_runner.logging.environment import environment
from dapo_runner.logging.metrics import jsonable
from dapo_runner.types import Group

TENSORBOARD = "tensorboard"
WANDB = "wandb"
# A run that is resumed goes on under the same id.
ID_FILES = {WANDB: "wandb-id.txt", "mlflow": "mlflow-id.txt", "trackio": "trackio-id.txt"}
PARAMS_AT_ONCE, PARAM_LENGTH = 100, 6000  # MLflow's limits


Table = list[dict[str, Any]]
"""A row for each sample, all with the same columns."""


class Tracker(Protocol):
    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def samples(self, step: int, name: str, table: Table) -> None:
        """``name`` tells those trained on from the answers of an evaluation."""
        ...

    def close(self) -> None: ...


def sample_table(step: int, groups: Sequence[Group], n: int) -> Table:
    """The first sample of each of the first ``n`` groups, which says nothing about length or reward."""
    return [
        {
            "step": step,
            "prompt": group.prompt.text,
            "answer": group.prompt.answer,
            "response": sample.completion.text,
            "extracted": sample.verdict.extracted,
            "correct": sample.correct,
            "reward": jsonable(sample.reward),
            "tokens": sample.completion.length,
            "finish_reason": sample.completion.finish_reason,
        }
        for group in groups[:n]
        for sample in group.samples[:1]
    ]


class TensorBoardTracker:
    """Event files under the run's folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, config: Config | SftConfig, first_step: int) -> None:
        """What an interrupted run had written of ``first_step`` and later no longer shows."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=first_step if first_step > 1 else None)
        for name, values in (("config", flatten(_plain(config))), ("environment", environment())):
            rows = [{"": key, name: str(value)} for key, value in values.items()]
            self.writer.add_text(name, _markdown(rows), first_step)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for key, value in _finite(figures).items():
            self.writer.add_scalar(key.replace("@", "_at_"), value, step)  # TensorBoard's names know no @
        self.writer.flush()

    def samples(self, step: int, name: str, table: Table) -> None:
        self.writer.add_text(name, _markdown(table), step)

    def close(self) -> None:
        self.writer.close()


class WandbTracker:
    """One W&B run for the run's whole life, resumed with it. Steps done again after a resume are logged again."""

    def __init__(self, folder: Path, config: Config | SftConfig) -> None:
        """Raises ConfigError where W&B cannot start, for instance without a login."""
        import wandb

        settings = config.logging.wandb
        assert settings is not None
        try:
            self.run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=config.run.name,
                id=_kept_id(folder, WANDB),
                resume="allow",
                dir=str(folder),
                mode=settings.mode,
                config={**_plain(config), "environment": environment()},
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

    def samples(self, step: int, name: str, table: Table) -> None:
        import wandb

        rows = [list(row.values()) for row in table]
        self.run.log({name: wandb.Table(columns=list(table[0]), data=rows), "step": step})

    def close(self) -> None:
        self.run.finish()


class MLflowTracker:
    """One MLflow run for the run's whole life. Steps done again after a resume are logged again."""

    def __init__(self, folder: Path, config: Config | SftConfig) -> None:
        """Raises ConfigError where the tracking server cannot be used."""
        import mlflow

        settings = config.logging.mlflow
        assert settings is not None
        path = folder / ID_FILES["mlflow"]
        try:
            self.client: Any = mlflow.MlflowClient(tracking_uri=settings.tracking_uri)
            if path.is_file():
                self.id = path.read_text(encoding="utf-8").strip()
                self.client.update_run(self.id, status="RUNNING")
            else:
                name = settings.experiment
                found = self.client.get_experiment_by_name(name)
                experiment = self.client.create_experiment(name) if found is None else found.experiment_id
                self.id = self.client.create_run(experiment, run_name=config.run.name).info.run_id
                path.write_text(self.id + "\n", encoding="utf-8")
                params = [
                    mlflow.entities.Param(key, str(value)[:PARAM_LENGTH])
                    for key, value in flatten(_plain(config)).items()
                ]
                for start in range(0, len(params), PARAMS_AT_ONCE):
                    self.client.log_batch(self.id, params=params[start : start + PARAMS_AT_ONCE])
            # What may have changed since the first time, which parameters must not.
            self.client.log_dict(self.id, _plain(config), "config.json")
            self.client.log_dict(self.id, environment(), "environment.json")
        except mlflow.exceptions.MlflowException as error:
            raise ConfigError(f"logging.mlflow: {str(error).strip().splitlines()[0]}") from error

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-./ ]", "_", key.replace("@", "_at_")), value, now, step)
            for key, value in _finite(figures).items()
        ]
        self.client.log_batch(self.id, metrics=metrics)

    def samples(self, step: int, name: str, table: Table) -> None:
        columns = list(table[0])
        content = {"columns": columns, "data": [list(row.values()) for row in table]}  # as MLflow stores its tables
        self.client.log_dict(self.id, content, f"{name}/step_{step:06d}.json")

    def close(self) -> None:
        self.client.set_terminated(self.id)


class TrackioTracker:
    """One trackio run for the run's whole life. Steps done again after a resume are logged again."""

    def __init__(self, folder: Path, config: Config | SftConfig) -> None:
        import trackio

        settings = config.logging.trackio
        assert settings is not None
        self.run: Any = trackio.init(
            project=settings.project,
            name=f"{config.run.name}-{_kept_id(folder, 'trackio')}",  # trackio knows a run by its name
            space_id=settings.space,
            resume="allow",
            config={**_plain(config), "environment": environment()},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(_finite(figures), step=step)

    def samples(self, step: int, name: str, table: Table) -> None:
        import trackio

        self.run.log({name: trackio.Table(data=list(table))}, step=step)

    def close(self) -> None:
        self.run.finish()


def check_trackers(config: LoggingConfig) -> None:
    """Raises ConfigError when a package that `logging` asks for is missing."""
    wanted = {
        TENSORBOARD: config.tensorboard,
        **{name: getattr(config, name) is not None for name in ID_FILES},
    }
    for name, enabled in wanted.items():
        if enabled and importlib.util.find_spec(name) is None:
            raise ConfigError(f"logging.{name}: needs the package {name}; pip install 'dapo-kernels[{name}]'")


def open_trackers(
    config: Config | SftConfig, folder: Path, first_step: int, leave_out: Callable[[str], None] | None = None
) -> list[Tracker]:
    """Open those that the configuration asks for. ``first_step`` is the first that will be written.

    Raises ConfigError where a package is missing, or a tracker cannot be opened: with ``leave_out``, as for a run that
    is resumed, that is called with the reason instead.
    """
    check_trackers(config.logging)
    settings, trackers = config.logging, list[Tracker]()
    wanted: dict[str, Callable[[], Tracker] | None] = {
        TENSORBOARD: partial(TensorBoardTracker, folder / TENSORBOARD, config, first_step)
        if settings.tensorboard
        else None,
        WANDB: partial(WandbTracker, folder, config) if settings.wandb is not None else None,
        "mlflow": partial(MLflowTracker, folder, config) if settings.mlflow is not None else None,
        "trackio": partial(TrackioTracker, folder, config) if settings.trackio is not None else None,
    }
    for name, make in wanted.items():
        try:
            if make is not None:
                trackers.append(make())
        except Exception as error:
            reason = str(error) if isinstance(error, ConfigError) else f"logging.{name}: {error}"
            if leave_out is None:
                raise ConfigError(reason) from error
            leave_out(f"{reason}. The run goes on without it")
    return trackers


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """None draws what is not finite; the JSONL log has it as null."""
    return {key: float(value) for key, value in figures.items() if math.isfinite(value)}


def _plain(config: Config | SftConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def _markdown(table: Table) -> str:
    def line(cells: Sequence[Any]) -> str:
        # What a response holds must end neither its cell nor its row, nor become HTML.
        texts = [json.dumps(cell, ensure_ascii=False) if not isinstance(cell, str) else cell for cell in cells]
        escaped = (text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;") for text in texts)
        return f"| {' | '.join(text.replace(chr(10), '<br>') for text in escaped)} |"

    head = list(table[0])
    return "\n".join([line(head), line(["---"] * len(head)), *(line(list(row.values())) for row in table)])


def _kept_id(folder: Path, tracker: str) -> str:
    path = folder / ID_FILES[tracker]
    if not path.is_file():
        path.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
