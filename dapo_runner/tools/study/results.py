"""What the runs of a study came to: the figures of each, read from its logs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

import numpy as np

from dapo_runner.early_stop import early_stop_metric
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.timing import seconds_by_phase
from dapo_runner.tools.study.plan import StudyRun

Series = tuple[list[float], list[float]]
"""Places on an axis and the values there."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    run: StudyRun
    events: list[dict[str, Any]]  # of metrics.jsonl
    axes: dict[str, dict[int, float]]  # by axis and step: what had been spent by the end of the step
    tail: int

    @property
    def metric(self) -> str:
        """The name of the accuracy, as it is logged."""
        return early_stop_metric(self.run.config)

    @property
    def accuracy(self) -> Series:
        """Of the evaluations, over the tokens generated before each."""
        return self.series(self.metric, "tokens")

    @property
    def before(self) -> float:
        return self.accuracy[1][0]

    @property
    def half(self) -> float:
        """The evaluation nearest to half of the tokens."""
        places, values = self.accuracy
        return min(zip(places, values, strict=True), key=lambda point: abs(point[0] - places[-1] / 2))[1]

    def accuracy_at(self, tokens: float) -> float:
        """Interpolated between the evaluations before and after so many tokens were generated."""
        return float(np.interp(tokens, *self.accuracy))

    @property
    def after(self) -> float:
        return self.accuracy[1][-1]

    def series(self, key: str, x: str) -> Series:
        """A figure of metrics.jsonl over an axis, where it was logged and is finite."""
        points = [(event["step"], event[key]) for event in self.events if event.get(key) is not None]
        return [self.axes[x][step] for step, _ in points], [value for _, value in points]

    def axes_by_step(self) -> dict[str, list[float]]:
        """The step, and what had been spent by the end of it."""
        steps = sorted(self.axes["step"])
        return {name: [_shorten(places[step]) for step in steps] for name, places in self.axes.items()}

    def curves(self, keys: Sequence[str]) -> dict[str, Series]:
        """Steps and values of the metrics that were logged, to six digits."""
        found = {key: self.series(key, "step") for key in dict.fromkeys(keys)}
        return {
            key: ([_shorten(step) for step in steps], [_shorten(value) for value in values])
            for key, (steps, values) in found.items()
            if steps
        }

    def first(self, key: str) -> float | None:
        """Mean over the first steps that logged it."""
        values = self.series(key, "step")[1]
        return fmean(values[: self.tail]) if values else None

    def last(self, key: str) -> float | None:
        values = self.series(key, "step")[1]
        return fmean(values[-self.tail :]) if values else None

    def total(self, x: str) -> float:
        """What was spent by the end of the run."""
        return max(self.axes[x].values())


def read_result(run: StudyRun, tail: int) -> Result:
    events = read_log(run.folder / METRICS_FILE)
    seconds: dict[int, float] = {}
    for event in read_log(run.folder / TIMINGS_FILE):
        seconds[event["step"]] = seconds.get(event["step"], 0.0) + sum(seconds_by_phase(event).values())
    steps: dict[int, dict[str, Any]] = {0: {}} | {event["step"]: event for event in events if event["kind"] == "step"}
    axes = {
        "step": {step: float(step) for step in steps},
        "tokens": _running(steps, lambda step: steps[step].get("sampling/tokens", 0)),
        "updates": _running(steps, lambda step: steps[step].get("train/updates", 0)),
        "seconds": _running(steps, lambda step: seconds.get(step, 0.0)),
    }
    return Result(run, events, axes, tail)


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """In the order of their seeds."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.run.seed):
        found.setdefault(result.run.variant, []).append(result)
    return found


def _running(steps: dict[int, Any], spent: Callable[[int], float]) -> dict[int, float]:
    ordered = sorted(steps)
    return dict(zip(ordered, accumulate(map(spent, ordered)), strict=True))


def _shorten(value: float) -> float:
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")
