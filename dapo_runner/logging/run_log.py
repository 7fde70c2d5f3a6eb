"""All that a run writes while it goes on, but for checkpoints: metrics, timings, rollouts, and what follows along."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dapo_runner.algorithms.token_values import TokenValues
from dapo_runner.checkpoint import Checkpoint, writing
from dapo_runner.config import LoggingConfig
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, MetricsLog, prefixed
from dapo_runner.logging.rollout_log import EVALUATIONS, ROLLOUTS, RolloutLog
from dapo_runner.logging.trackers import Tracker, sample_table
from dapo_runner.types import Group
from dapo_runner.types import Sequence as TrainingSequence

CHECKPOINTS = "checkpoints"
CHANGES_FILE = "changes.jsonl"

Changes = Iterable[tuple[str, Any, Any]]
"""Settings, each with its values before and after."""


class RunLog:
    """Where nothing can be written, its methods raise CheckpointError."""

    def __init__(
        self,
        folder: Path,
        config: LoggingConfig,
        trackers: Sequence[Tracker],
        *,
        first_step: int,
        keep_through: int,
        tokenizer: Any = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """Go on after ``first_step``, with what was logged of steps up to ``keep_through``: one less where the run has
        its beginning there, since what an attempt without a checkpoint logged does not count.
        """
        self.folder = folder
        self.first_step = first_step
        self.trackers = trackers
        self.note = note
        self._tracker_failures = Counter[str]()
        self._quiet_until: dict[str, float] = {}  # trackers that failed, until they are tried again
        self.n_samples = config.samples
        self.metrics = MetricsLog(folder / METRICS_FILE, keep_through=keep_through)
        self.timings = MetricsLog(folder / TIMINGS_FILE, keep_through=keep_through)
        tokens_of = tokenizer if config.rollouts.per_token else None
        self.rollouts = RolloutLog(folder / ROLLOUTS, config.rollouts, keep_through=keep_through, tokenizer=tokens_of)
        self.evaluations = RolloutLog(folder / EVALUATIONS, config.evaluations, keep_through=keep_through)

    def step(
        self,
        step: int,
        figures: Mapping[str, float],
        groups: Sequence[Group],
        sequences: Sequence[TrainingSequence],
        values: Mapping[int, TokenValues],
    ) -> str | None:
        """A step's figures and rollouts. Returns what a person should know of the latter."""
        with writing(self.folder / ROLLOUTS, self.folder / CHECKPOINTS):
            news = self.rollouts.write(step, groups, sequences, values)
        self.figures(step, "step", figures)
        self._samples(step, "samples/trained", groups)
        return news

    def changes(self, changes: Changes) -> None:
        """What is set otherwise from here on."""
        _log_changes(self.folder, self.first_step, changes)

    def evaluation(self, step: int, figures: Mapping[str, float], groups: Sequence[Group]) -> str | None:
        """Figures and answers. Returns what a person should know of the latter."""
        with writing(self.folder / EVALUATIONS, self.folder / CHECKPOINTS):
            news = self.evaluations.write(step, groups)
        self.figures(step, "eval", figures)
        self._samples(step, "samples/eval", groups)
        return news

    def seconds(
        self, step: int, seconds: Mapping[str, float], speed: Mapping[str, float], calls: Mapping[str, int]
    ) -> None:
        """Where a step's wall time went, or that of what comes before the first, and what it amounts to; what became of
        calls of reward functions.
        """
        figures = prefixed("seconds", seconds) | prefixed("speed", speed) | prefixed("reward", calls)
        figures |= prefixed("tracker", {f"{name}_failed": n for name, n in self._tracker_failures.items()})
        with writing(self.folder / TIMINGS_FILE, self.folder / CHECKPOINTS):
            self.timings.write(step, "step" if step > self.first_step else "start", figures)
        self._track(lambda tracker: tracker.write(step, figures))

    def close(self) -> None:
        self._track(lambda tracker: tracker.close())
        for name, n in self._tracker_failures.items():
            self.note(f"logging.{name}: {n} writes failed; {self.folder / METRICS_FILE} has all figures")

    def figures(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        """A line of `metrics.jsonl`, and the same to the trackers."""
        with writing(self.folder / METRICS_FILE, self.folder / CHECKPOINTS):
            self.metrics.write(step, kind, figures)
        self._track(lambda tracker: tracker.write(step, figures))

    def _track(self, write: Callable[[Tracker], None]) -> None:
        """Call each tracker. None ends a run, or slows it by more than a tenth: failures are noted once and counted."""
        for tracker in self.trackers:
            name, began = type(tracker).__name__.removesuffix("Tracker").lower(), time.monotonic()
            try:
                if began < self._quiet_until.get(name, began):
                    self._tracker_failures[name] += 1
                    continue
                write(tracker)
            except Exception as error:
                if not self._tracker_failures[name]:
                    self.note(f"logging.{name}: a write failed, the run goes on: {type(error).__name__}: {error}")
                self._tracker_failures[name] += 1
                now = time.monotonic()
                self._quiet_until[name] = now + 10 * (now - began)

    def _samples(self, step: int, name: str, groups: Sequence[Group]) -> None:
        if not self.trackers or not (table := sample_table(step, groups, self.n_samples)):
            return
        self._track(lambda tracker: tracker.samples(step, name, table))


def log_fork(folder: Path, origin: Checkpoint, changes: Changes) -> None:
    """The first line of a run that goes on from another one's checkpoint, and what is set otherwise than there."""
    MetricsLog(folder / CHANGES_FILE).write(origin.step, "fork", {"from": str(origin.path.resolve())})
    _log_changes(folder, origin.step, changes)


def _log_changes(folder: Path, step: int, changes: Changes) -> None:
    """No file where there is nothing to say."""
    changes = list(changes)
    if not changes:
        return
    with writing(folder / CHANGES_FILE, folder / CHECKPOINTS):
        log = MetricsLog(folder / CHANGES_FILE, keep_through=step)
        for key, before, after in changes:
            log.write(step, "change", {"key": key, "before": before, "after": after})
