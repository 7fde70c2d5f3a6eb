"""The runs of a study, read from their logs alone: curves, what was spent by each step, and the values of the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

import numpy as np

from dapo_runner.early_stop import early_stop_metric
from dapo_runner.logging.curves import Points, collect
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.timing import seconds_by_phase
from dapo_runner.tools.study.plan import StudyRun

Series = tuple[list[float], list[float]]
"""Places on an axis and the values there."""
Values = Mapping[str, float | None]
"""The values of a run: what the table has of it."""

MEANS = {"entropy": "train/entropy", "length": "sampling/length", "truncated": "sampling/truncated"}
TAIL = 10  # steps that "first" and "last" figures are means over
SPENT = {"tokens": "sampling/tokens", "updates": "train/updates"}
TOTALS = {"steps": "step", "updates": "updates", "tokens": "tokens", "seconds": "seconds"}


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run."""

    run: StudyRun
    points: Points  # of metrics.jsonl
    axes: dict[str, dict[int, float]]  # by axis and step: what had been spent by the end of the step

    @property
    def metric(self) -> str:
        """The name of the accuracy, as it is logged."""
        return early_stop_metric(self.run.config)

    @property
    def accuracy(self) -> Series:
        """Of the evaluations, over the tokens generated before each."""
        return self.series(self.metric, "tokens")

    def series(self, key: str, axis: str) -> Series:
        """Return a metric over an axis, where it was logged and is finite."""
        found = [
            (step, value) for step, value in zip(*self.points.get(key, ([], [])), strict=True) if math.isfinite(value)
        ]
        return [self.axes[axis][step] for step, _ in found], [value for _, value in found]

    def total(self, axis: str) -> float:
        return max(self.axes[axis].values())

    def values(self, equal_tokens: float) -> dict[str, float | None]:
        """Return the values of the table, with the accuracy interpolated at ``equal_tokens``."""
        tokens, accuracy = self.accuracy
        half = min(zip(tokens, accuracy, strict=True), key=lambda point: abs(point[0] - tokens[-1] / 2))[1]
        values: dict[str, float | None] = {"before": accuracy[0], "half": half, "after": accuracy[-1]}
        for name, key in MEANS.items():
            _, logged = self.series(key, "step")
            values[f"{name}_first"] = fmean(logged[:TAIL]) if logged else None
            values[f"{name}_last"] = fmean(logged[-TAIL:]) if logged else None
        values |= {name: self.total(axis) for name, axis in TOTALS.items()}
        return values | {"at_equal_tokens": float(np.interp(equal_tokens, tokens, accuracy))}

    def as_json(self, curves: Iterable[str]) -> dict[str, Any]:
        """Return axes and curves to six digits, from which pictures can be drawn again."""
        steps = sorted(self.axes["step"])
        found = {key: self.series(key, "step") for key in dict.fromkeys((self.metric, *curves))}
        return {
            "axes": {name: _shorten(places[step] for step in steps) for name, places in self.axes.items()},
            "curves": {key: [_shorten(part) for part in series] for key, series in found.items() if series[0]},
        }


def read_result(run: StudyRun) -> Result:
    events = read_log(run.folder / METRICS_FILE)
    points = collect(events)
    seconds: dict[int, float] = {}
    for event in read_log(run.folder / TIMINGS_FILE):
        seconds[event["step"]] = seconds.get(event["step"], 0.0) + sum(seconds_by_phase(event).values())
    steps = [0, *(event["step"] for event in events if event["kind"] == "step")]
    spent = {name: dict(zip(*points.get(key, ([], [])), strict=True)) for name, key in SPENT.items()}
    spent |= {"step": dict.fromkeys(steps[1:], 1.0), "seconds": seconds}
    return Result(run, points, {name: _running(steps, of_step) for name, of_step in spent.items()})


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results, in the order of their seeds."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.run.seed):
        found.setdefault(result.run.variant, []).append(result)
    return found


def _running(steps: Sequence[int], spent: Mapping[int, float]) -> dict[int, float]:
    return dict(zip(steps, accumulate(spent.get(step, 0.0) for step in steps), strict=True))


def _shorten(values: Iterable[float]) -> list[float]:
    return [int(value) if value == int(value) else float(f"{value:.6g}") for value in values]
