"""The logs of a run as curves: what picture, page and studies draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.timing import seconds_by_phase

Points = dict[str, tuple[list[int], list[float]]]
"""Name of a metric → steps and values; NaN where null was logged."""

# Phases that are drawn together; any other is part of the rest.
TIME_GROUPS = {
    "rollout": "rollout",
    "forward_backward": "update",
    "optimizer": "update",
    "critic": "update",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "old_logprobs",
    "values": "old_logprobs",
    "evaluate": "evaluate",
}
BY_CORRECTNESS = ("sampling/all_incorrect", "sampling/mixed", "sampling/all_correct")


def read_curves(run: Path) -> Points:
    """Return all metrics in the logs of a run, none where there are no logs."""
    paths = (run / METRICS_FILE, run / TIMINGS_FILE)
    metrics, timings = (read_log(path) if path.is_file() else [] for path in paths)
    return collect([*metrics, *time_events(timings)])


def collect(events: list[dict[str, Any]]) -> Points:
    """Return log lines as curves."""
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


def time_events(timings: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each step by what is drawn together: every curve has a value at every step."""
    for event in timings:
        if event["kind"] == "step":
            yield {"step": event["step"], "kind": "time", **_seconds_by_group(event)}


def _seconds_by_group(event: Mapping[str, Any]) -> dict[str, float]:
    seconds = dict.fromkeys([f"time/{group}" for group in (*TIME_GROUPS.values(), "rest")], 0.0)
    for phase, spent in seconds_by_phase(event).items():
        seconds[f"time/{TIME_GROUPS.get(phase, 'rest')}"] += spent
    return seconds


def find_curve(points: Points, key: str) -> tuple[str, list[int], list[float]] | None:
    """Return what the star of ``key`` stands for, steps and values; None where it was not logged."""
    if not key.endswith("*"):
        return ("", *points[key]) if key in points else None
    stem = key[:-1]
    name = next((name for name in points if name.startswith(stem)), None)
    return None if name is None else (f"{stem[-1]}{name.removeprefix(stem)}", *points[name])
