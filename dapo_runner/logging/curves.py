"""Read the logs of a run as curves, for the picture, the page and studies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_runner.files import read_jsonl
from dapo_runner.logging.metric_table import TOOL_CALLS
from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE
from dapo_runner.timing import seconds_by_phase

Points = dict[str, tuple[list[int], list[float]]]
"""Steps and values by metric name; NaN where null was logged."""

TIME_GROUPS = {  # phases that are drawn together; all others are the rest
    "rollout": ("rollout",),
    "update": ("forward_backward", "optimizer", "critic"),
    "old_logprobs": ("old_logprobs", "ref_logprobs", "values"),
    "evaluate": ("evaluate",),
}
BY_CORRECTNESS = ("sampling/all_incorrect", "sampling/mixed", "sampling/all_correct")


def read_curves(run: Path) -> Points:
    """Return all metrics in the logs of a run; empty without logs."""
    paths = (run / METRICS_FILE, run / TIMINGS_FILE)
    metrics, timings = (read_jsonl(path, "step", "kind") if path.is_file() else [] for path in paths)
    return collect([*metrics, *time_events(timings)])


def collect(events: Iterable[Mapping[str, Any]]) -> Points:
    points: Points = {}
    for event in events:
        for key, value in event.items():
            if key not in ("step", "kind") and not isinstance(value, str):
                steps, values = points.setdefault(key, ([], []))
                steps.append(event["step"])
                values.append(float("nan") if value is None else float(value))
    if "sampling/varying_reward" in points:  # groups are not accepted by correctness
        points = {key: curve for key, curve in points.items() if key not in BY_CORRECTNESS}
    return points


def time_events(timings: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each step, summed by ``TIME_GROUPS``, and its calls of tools."""
    for timing in timings:
        if timing["kind"] == "step":
            seconds = seconds_by_phase(timing)
            groups = {f"time/{name}": sum(seconds.pop(p, 0.0) for p in phases) for name, phases in TIME_GROUPS.items()}
            calls = {curve.key: timing[curve.key] for curve in TOOL_CALLS if curve.key in timing}
            yield {"step": timing["step"], **calls, **groups, "time/rest": sum(seconds.values())}


def find_curve(points: Points, key: str) -> tuple[str, list[int], list[float]] | None:
    """Return the suffix that the star of ``key`` matches, steps and values; None if it was not logged."""
    if not key.endswith("*"):
        return ("", *points[key]) if key in points else None
    stem = key[:-1]
    name = next((name for name in points if name.startswith(stem)), None)
    return None if name is None else (f"{stem[-1]}{name.removeprefix(stem)}", *points[name])
