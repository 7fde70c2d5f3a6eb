"""All that a run writes while it goes on, but for checkpoints: metrics, timings, rollouts, and what follows along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dapo_runner.checkpoint import writing
from dapo_runner.config import RolloutLogConfig
from dapo_runner.records.metrics import METRICS_FILE, TIMINGS_FILE, MetricsLog, prefixed
from dapo_runner.records.rollout_log import ROLLOUTS, RolloutLog
from dapo_runner.records.trackers import Tracker
from dapo_runner.types import Group
from dapo_runner.types import Sequence as TrainingSequence

CHECKPOINTS = "checkpoints"


class RunLog:
    """Where nothing can be written, its methods raise CheckpointError."""

    def __init__(
        self, folder: Path, config: RolloutLogConfig, trackers: Sequence[Tracker], *, resumed_after: int | None
    ) -> None:
        """Go on after step ``resumed_after``; None: what an attempt without a checkpoint logged does not count."""
        keep_through = -1 if resumed_after is None else resumed_after
        self.folder = folder
        self.trackers = trackers
        self.metrics = MetricsLog(folder / METRICS_FILE, keep_through=keep_through)
        self.timings = MetricsLog(folder / TIMINGS_FILE, keep_through=keep_through)
        self.rollouts = RolloutLog(folder / ROLLOUTS, config, keep_through=keep_through)

    def step(
        self,
        step: int,
        figures: Mapping[str, float],
        groups: Sequence[Group],
        sequences: Sequence[TrainingSequence],
    ) -> str | None:
        """A step's figures and rollouts. Returns what a person should know of the latter."""
        with writing(self.folder / ROLLOUTS, self.folder / CHECKPOINTS):
            news = self.rollouts.write(step, groups, sequences)
        self._metrics(step, "step", figures)
        return news

    def evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        self._metrics(step, "eval", figures)

    def seconds(self, step: int, seconds: Mapping[str, float]) -> None:
        """Where a step's wall time went; step 0 is what comes before the first."""
        figures = prefixed("seconds", seconds)
        with writing(self.folder / TIMINGS_FILE, self.folder / CHECKPOINTS):
            self.timings.write(step, "step" if step else "start", figures)
        for tracker in self.trackers:
            tracker.write(step, figures)

    def close(self) -> None:
        self.metrics.close()
        self.timings.close()
        for tracker in self.trackers:
            tracker.close()

    def _metrics(self, step: int, kind: str, figures: Mapping[str, float]) -> None:
        with writing(self.folder / METRICS_FILE, self.folder / CHECKPOINTS):
            self.metrics.write(step, kind, figures)
        for tracker in self.trackers:
            tracker.write(step, figures)
