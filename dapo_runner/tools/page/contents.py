"""What the page shows of runs, as JSON has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo_runner.logging.metrics import METRICS_FILE, TIMINGS_FILE, read_log
from dapo_runner.logging.report import PANELS, collect, time_events
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps


def contents(runs: Sequence[Path]) -> dict[str, Any]:
    """Panels, and of each run its name, its curves and the steps whose rollouts are kept."""
    names = _names(runs)
    return {
        "panels": [asdict(panel) for panel in PANELS],
        "runs": [
            {"name": name, "curves": _curves(run), "steps": list(saved_steps(run / ROLLOUTS))}
            for name, run in zip(names, runs, strict=True)
        ],
    }


def read_if_there(path: Path) -> list[dict[str, Any]]:
    return read_log(path) if path.is_file() else []


def _names(runs: Sequence[Path]) -> list[str]:
    """Of folders, with as much of the path as tells them apart."""
    parts = [run.resolve().parts for run in runs]
    depths = (n for n in range(1, max(map(len, parts)) + 1) if len({part[-n:] for part in parts}) == len(parts))
    depth = next(depths, 1)
    return ["/".join(part[-depth:]) for part in parts]


def _curves(run: Path) -> dict[str, tuple[list[int], list[float | None]]]:
    points = collect(read_if_there(run / METRICS_FILE) + time_events(read_if_there(run / TIMINGS_FILE)))
    return {
        key: (steps, [value if math.isfinite(value) else None for value in values])
        for key, (steps, values) in points.items()
    }
