"""Write all files of a run except checkpoints: metrics, timings, rollouts, trackers, failed batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dapo_runner.algorithms.selection import TokenValues
from dapo_runner.checkpoint.files import Checkpoint, writing
from dapo_runner.config import Config, SftConfig
from dapo_runner.files import append_jsonl, share
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, MetricsLog, jsonable, prefixed
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS, RolloutLog
from dapo_runner.logging.trackers import Trackers
from dapo_runner.types import Group, PackedBatch, TrainingSequence

CHECKPOINTS = "checkpoints"
CHANGES_FILE = "changes.jsonl"
TABLE_ROWS = 8  # responses in the trackers' table of a step or an evaluation, each of another group

Changes = Iterable[tuple[str, Any, Any]]
"""Settings with their values before and after."""


class RunLog:
    """Write the files of a run. Its methods raise CheckpointError if a file cannot be written."""

    def __init__(
        self, config: Config | SftConfig, trackers: Trackers, *, first_step: int, keep_through: int, tokenizer: Any
    ) -> None:
        """Continue after ``first_step`` and keep the log lines of steps up to ``keep_through``. For a new run that is
        one less than ``first_step``, to remove the lines of an attempt that saved no checkpoint.
        """
        folder, settings = config.run_dir, config.logging
        self.folder, self.first_step, self.trackers = folder, first_step, trackers
        self.n_groups = settings.rollouts.groups  # whose first sample goes to the trackers
        self.metrics = MetricsLog(folder / METRICS_FILE, keep_through=keep_through)
        self._timings = MetricsLog(folder / TIMINGS_FILE, keep_through=keep_through)
        token_tokenizer = tokenizer if settings.rollouts.per_token else None
        self._rollouts = RolloutLog(folder / ROLLOUTS, settings.rollouts, keep_through, token_tokenizer)
        self._evaluations = RolloutLog(folder / EVALUATIONS, settings.rollouts, keep_through)

    def step(
        self,
        step: int,
        figures: Mapping[str, float],
        groups: Sequence[Group],
        sequences: Sequence[TrainingSequence],
        values: Mapping[int, TokenValues],
    ) -> None:
        with _writing(self.folder, ROLLOUTS):
            self._rollouts.write(step, groups, sequences, values)
        self.figures(step, "step", figures)
        self.trackers.samples(step, "samples/trained", groups[: self.n_groups][:TABLE_ROWS])

    def evaluation(self, step: int, figures: Mapping[str, float], groups: Sequence[Group]) -> None:
        with _writing(self.folder, EVALUATIONS):
            self._evaluations.write(step, groups)
        self.figures(step, "eval", figures)
        self.trackers.samples(step, "samples/eval", groups[: self.n_groups][:TABLE_ROWS])

    def figures(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """Write a line of `metrics.jsonl` and send it to the trackers."""
        with _writing(self.folder, METRICS_FILE):
            self.metrics.write(step, kind, figures)
        self.trackers.write(step, kind, figures)

    def seconds(
        self, step: int, seconds: Mapping[str, float], speed: Mapping[str, float], calls: Mapping[str, float]
    ) -> None:
        """Write the seconds by phase of a step, or of the start of the run, with its speed and its counts of calls."""
        figures = prefixed("seconds", seconds) | prefixed("speed", speed) | dict(calls)
        with _writing(self.folder, TIMINGS_FILE):
            self._timings.write(step, "step" if step > self.first_step else "start", figures)
        self.trackers.write(step, "seconds", figures)


def log_fork(folder: Path, origin: Checkpoint, changes: Changes) -> None:
    """Write the origin of a fork and the settings that differ from it."""
    MetricsLog(folder / CHANGES_FILE).write(origin.step, "fork", {"from": str(origin.path.resolve())})
    log_changes(folder, origin.step, changes)


def save_batch(path: Path, batches: Sequence[PackedBatch], error: str) -> None:
    """Write the micro-batches of a failed update as safetensors with names ``<number>.<field>``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {f"{n}.{name}": tensor for n, batch in enumerate(batches) for name, tensor in batch.tensors().items()}
    save_file({name: tensor.cpu().contiguous() for name, tensor in named.items()}, path, metadata={"error": error})
    share(path)


def log_changes(folder: Path, step: int, changes: Changes) -> None:
    """Write the settings that have changed from ``step`` on."""
    if not (rows := [jsonable({"key": key, "before": before, "after": after}) for key, before, after in changes]):
        return  # do not create an empty file
    with _writing(folder, CHANGES_FILE):
        path = MetricsLog(folder / CHANGES_FILE, keep_through=step).path
        append_jsonl(path, [{"step": step, "kind": "change", **row} for row in rows], sync=True)


def _writing(folder: Path, name: str) -> AbstractContextManager[None]:
    return writing(folder / name, folder / CHECKPOINTS)
