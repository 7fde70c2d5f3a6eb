"""Read the results of a study's runs from their logs, and compute statistics over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import ttest_rel

from dapo_runner.errors import ConfigError
from dapo_runner.files import read_jsonl
from dapo_runner.logging.curves import Points, collect
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE
from dapo_runner.run.early_stop import early_stop_metric
from dapo_runner.timing import seconds_by_phase
from dapo_runner.tools.study.runs import StudyRun

Series = tuple[list[float], list[float]]
"""Positions on an axis, and the values there."""
Values = Mapping[str, float | None]
"""The values of a run in the table, by name."""

MEANS = {"entropy": "train/entropy", "length": "sampling/length", "truncated": "sampling/truncated"}
TAIL = 10  # steps in the means of "first" and "last" values
SPENT = {"tokens": "sampling/tokens", "updates": "train/updates"}
ROUNDING = 1e-12  # bound on the rounding error of a difference of two values in [0, 1]


class Result(NamedTuple):
    """A finished run. ``axes``: the position of each step's end on each axis, such as tokens generated so far."""

    variant: str
    seed: int
    metric: str  # of accuracy, by its name in the log
    made_with: str  # machine, versions and commit
    points: Points  # of metrics.jsonl
    axes: dict[str, dict[int, float]]

    @property
    def accuracy(self) -> Series:
        """The accuracy of each evaluation, over the tokens generated before it."""
        return self.series(self.metric, "tokens")

    def series(self, key: str, axis: str) -> Series:
        """Return a metric over an axis, without values that are not finite."""
        steps, values = self.points.get(key, ([], []))
        found = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        return [self.axes[axis][step] for step, _ in found], [value for _, value in found]

    def total(self, axis: str) -> float:
        return max(self.axes[axis].values())

    def values(self, equal_tokens: float) -> dict[str, float | None]:
        """Return the values for the table, None for what was not logged: cons@k needs extracted answers."""
        tokens, accuracy = self.accuracy
        values: dict[str, float | None] = dict.fromkeys(("before", "half", "after", "at_equal_tokens"))
        if accuracy and tokens[-1] == self.total("tokens"):  # else the last evaluation did not log it
            nearest = min(range(len(tokens)), key=lambda index: abs(tokens[index] - tokens[-1] / 2))
            interpolated = float(np.interp(equal_tokens, tokens, accuracy))
            half = accuracy[nearest] if nearest else None  # else nothing was measured between start and end
            values = dict(zip(values, (accuracy[0], half, accuracy[-1], interpolated), strict=True))
        for name, key in MEANS.items():
            _, logged = self.series(key, "step")
            n = min(TAIL, max(1, len(logged) // 2))
            values[f"{name}_first"] = fmean(logged[:n]) if logged else None
            values[f"{name}_last"] = fmean(logged[-n:]) if logged else None
        return values | {"steps" if axis == "step" else axis: self.total(axis) for axis in self.axes}

    def as_json(self, equal_tokens: float, curves: Iterable[str]) -> dict[str, Any]:
        """Return values, axes and curves as JSON, from which table and pictures can be made again."""
        found = {key: self.series(key, "step") for key in dict.fromkeys((self.metric, *MEANS.values(), *curves))}
        return {
            **{name: getattr(self, name) for name in ("variant", "seed", "metric", "made_with")},
            **self.values(equal_tokens),
            "axes": {name: list(places.values()) for name, places in self.axes.items()},
            "curves": {key: series for key, series in found.items() if series[0]},
        }


def load_results(path: Path) -> list[Result]:
    """Return the results in a study's JSON file, with the curves that are in it. Raises ConfigError."""
    results = []
    try:
        for run in json.loads(path.read_text(encoding="utf-8")):
            axes = {name: dict(zip(run["axes"]["step"], places, strict=True)) for name, places in run["axes"].items()}
            results.append(Result(run["variant"], run["seed"], run["metric"], run["made_with"], run["curves"], axes))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: expected the values and curves of a study, got {error!r}") from error
    return results


def read_result(run: StudyRun) -> Result:
    events = read_jsonl(run.folder / METRICS_FILE)
    points = collect(events)
    steps = [events[0]["step"] - (events[0]["kind"] == "step"), *(e["step"] for e in events if e["kind"] == "step")]
    spent = {name: dict(zip(*points.get(key, ([], [])), strict=True)) for name, key in SPENT.items()}
    spent |= {"step": dict.fromkeys(steps[1:], 1), "seconds": {}}
    for event in read_jsonl(run.folder / TIMINGS_FILE):
        before = spent["seconds"].get(event["step"], 0.0)
        spent["seconds"][event["step"]] = before + sum(seconds_by_phase(event).values())
    axes = {
        name: dict(zip(steps, accumulate(by_step.get(step, 0) for step in steps), strict=True))
        for name, by_step in spent.items()
    }
    return Result(run.variant, run.seed, early_stop_metric(run.config), run.made_with, points, axes)


def by_variant(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Group results by variant, ordered by seed."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        found.setdefault(result.variant, []).append(result)
    return found


class Estimate(NamedTuple):
    """A mean over seeds and its standard error s/√n. The error is None for a single seed."""

    mean: float
    error: float | None


class PairedTest(NamedTuple):
    """Student's paired t-test over the seeds that two variants share: two-sided p and the 95 % confidence interval.

    Both are None with fewer than two seeds, or if all differences are equal.
    """

    difference: Estimate
    p: float | None = None
    interval: tuple[float, float] | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean and its standard error; None without values."""
    if not values:
        return None
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None)


def paired_test(values: Sequence[float], others: Sequence[float]) -> PairedTest | None:
    """Test whether ``values`` − ``others``, pair by pair, has mean zero. None without a pair."""
    difference = estimate([value - other for value, other in zip(values, others, strict=True)])
    if difference is None or difference.error is None or difference.error < ROUNDING:
        return None if difference is None else PairedTest(difference)
    test = ttest_rel(values, others)
    interval = test.confidence_interval(0.95)
    return PairedTest(difference, float(test.pvalue), (float(interval.low), float(interval.high)))


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, which bounds the probability of any false positive (Holm 1979)."""
    order = np.argsort(ps)
    scaled = np.asarray(ps)[order] * np.arange(len(ps), 0, -1)
    corrected = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(corrected[rank]) for rank in np.argsort(order)]
