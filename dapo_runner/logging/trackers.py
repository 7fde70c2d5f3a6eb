"""TensorBoard, Weights & Biases, MLflow and trackio through accelerate: `logging.trackers`.

They get the figures of the JSONL logs, tables of samples, the configuration and the environment. A run goes the same
way with and without them. Accounts, servers and modes are set by each library's own environment variables.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import textwrap
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dapo_runner.config import Config, LoggingConfig, SftConfig, flatten
from dapo_runner.errors import ConfigError
from dapo_runner.files import atomic_write
from dapo_runner.logging.environment import environment
from dapo_runner.logging.metrics import jsonable
from dapo_runner.types import Group

MAX_FAILURES = 3  # of a tracker, which gets nothing more after them

Table = list[dict[str, Any]]
"""A row per sample, all with the same columns."""


def sample_table(step: int, groups: Sequence[Group], n: int) -> Table:
    """Return the first sample of each of the first ``n`` groups: a choice that depends on neither length nor reward."""
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


class Tracker:
    """One tracker of a run. A resumed run goes on under the same id and sends no step twice."""

    def __init__(self, name: str, config: Config | SftConfig, folder: Path, first_step: int) -> None:
        """Raises what the library raises where it cannot start, for instance without a login."""
        self.name = name
        self._path = folder / f"tracker-{name}.json"
        is_new = not self._path.is_file()
        self._state: dict[str, Any] = {"id": None, "logged": {}} if is_new else json.loads(self._path.read_text())
        self._tracker = _make(name, config, folder, first_step, self._state)
        self._tracker.start()
        if is_new and name == "tensorboard":
            self._tracker.log({"config": _as_text(_described(config))}, step=0)
        if name == "mlflow":
            self._state["id"] = self._tracker.tracker.info.run_id
            if is_new:
                self._tracker.store_init_configuration(_described(config))
        self._save()

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Send figures. ``kind`` tells those of one step apart."""
        values = {_name(key): float(value) for key, value in figures.items() if math.isfinite(value)}
        if self._is_new(step, kind):
            self._tracker.log(values, step=step)
            self._save()

    def table(self, step: int, name: str, rows: Table) -> None:
        if not self._is_new(step, name):
            return
        columns, data = list(rows[0]), [list(row.values()) for row in rows]
        if self.name == "wandb":
            self._tracker.log_table(name, columns=columns, data=data, step=step)
        elif self.name == "mlflow":
            import mlflow

            mlflow.log_dict({"columns": columns, "data": data}, f"{name}/step_{step:06d}.json")
        elif self.name == "trackio":
            import trackio

            self._tracker.log({name: trackio.Table(data=rows)}, step=step)
        else:
            self._tracker.log({name: _as_text(rows)}, step=step)
        self._save()

    def close(self) -> None:
        self._tracker.finish()

    def _is_new(self, step: int, kind: str) -> bool:
        """Note that a step was sent. TensorBoard, which replaces what a resumed run writes again, gets every step."""
        logged = self._state["logged"]
        if step <= logged.get(kind, -1) and self.name != "tensorboard":
            return False
        logged[kind] = step
        return True

    def _save(self) -> None:
        atomic_write(self._path, json.dumps(self._state))


class Trackers:
    """All trackers of a run. None ends it: the first failure of each is noted, and so is that it gets no more."""

    def __init__(self, trackers: Sequence[Tracker], note: Callable[[str], None]) -> None:
        self._trackers = list(trackers)
        self._note = note
        self._failures = Counter[str]()

    def write(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        self._call(lambda tracker: tracker.write(step, kind, figures))

    def samples(self, step: int, name: str, table: Table) -> None:
        """Send a table. ``name`` tells samples that were trained on from answers of an evaluation."""
        if table:
            self._call(lambda tracker: tracker.table(step, name, table))

    def close(self) -> None:
        self._call(lambda tracker: tracker.close())

    def _call(self, send: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                send(tracker)
            except Exception as error:
                self._count_failure(tracker, error)

    def _count_failure(self, tracker: Tracker, error: Exception) -> None:
        self._failures[tracker.name] += 1
        if self._failures[tracker.name] == 1:
            self._note(f"logging.trackers: {tracker.name} failed, the run goes on: {type(error).__name__}: {error}")
        if self._failures[tracker.name] == MAX_FAILURES:
            self._trackers.remove(tracker)
            self._note(f"logging.trackers: {tracker.name} failed {MAX_FAILURES} times and gets no more figures")


def check_trackers(config: LoggingConfig) -> None:
    """Raise ConfigError when a package that `logging.trackers` asks for is missing."""
    for name in config.trackers:
        for package in (name, "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"logging.trackers: {name} requires the package {package}. pip install 'dapo-kernels[{name}]'"
                )


def open_trackers(
    config: Config | SftConfig, folder: Path, first_step: int, note: Callable[[str], None], is_resumed: bool
) -> Trackers:
    """Open the trackers of a run. ``first_step`` is the first that will be written.

    Raises ConfigError where a package is missing or a tracker cannot be opened. A resumed run goes on without it.
    """
    check_trackers(config.logging)
    opened = []
    for name in dict.fromkeys(config.logging.trackers):
        try:
            opened.append(Tracker(name, config, folder, first_step))
        except Exception as error:
            reason = f"logging.trackers: {name}: {str(error).strip() or type(error).__name__}".splitlines()[0]
            if not is_resumed:
                raise ConfigError(reason) from error
            note(f"{reason}. The run goes on without it.")
    return Trackers(opened, note)


def _make(name: str, config: Config | SftConfig, folder: Path, first_step: int, state: dict[str, Any]) -> Any:
    """Return accelerate's tracker, not started. ``state`` has the id of the run, once there is one."""
    from accelerate import PartialState
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

    threads = torch.get_num_threads()
    PartialState(cpu=True)  # accelerate logs nothing without it, and it may change the number of threads
    torch.set_num_threads(threads)
    project, run = config.logging.project, config.run.name
    if name == "tensorboard":
        return TensorBoardTracker(name, folder, purge_step=first_step if first_step > 1 else None)
    if name == "mlflow":
        return MLflowTracker(project, run_name=run, run_id=state["id"])
    state["id"] = state["id"] or uuid.uuid4().hex[:12]
    settings: dict[str, Any] = {"resume": "allow", "config": _described(config)}
    if name == "trackio":  # knows a run by its name
        settings |= {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return TrackioTracker(project, name=f"{run}-{state['id']}", **settings)
    settings["settings"] = {"silent": True, "console": "off"}  # its lines would tear the live display
    return WandBTracker(project, name=run, id=state["id"], dir=str(folder), **settings)


def _described(config: Config | SftConfig) -> dict[str, str]:
    """Return the configuration and the environment, by dotted keys."""
    values = {key: str(value) for key, value in flatten(config.model_dump(mode="json", by_alias=True)).items()}
    return values | {f"environment.{key}": value for key, value in environment().items()}


def _name(key: str) -> str:
    """Return a metric's name in the characters that all trackers take."""
    return re.sub(r"[^\w\-./ ]", "_", key.replace("@", "_at_"))


def _as_text(value: Any) -> str:
    """Return a block of code in Markdown, which nothing in ``value`` can end."""
    return textwrap.indent(json.dumps(value, indent=2, ensure_ascii=False), "    ")
