"""What the page shows of runs, as JSON has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo_runner.logging.curves import read_curves
from dapo_runner.logging.metric_table import PANELS
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


def _names(runs: Sequence[Path]) -> list[str]:
    """Of folders, with as much of the path as tells them apart."""
    parts = [run.resolve().parts for run in runs]
    depths = (n for n in range(1, max(map(len, parts)) + 1) if len({part[-n:] for part in parts}) == len(parts))
    depth = next(depths, 1)
    return ["/".join(part[-depth:]) for part in parts]


def _curves(run: Path) -> dict[str, tuple[list[int], list[float | None]]]:
    return {
        key: (steps, [value if math.isfinite(value) else None for value in values])
        for key, (steps, values) in read_curves(run).items()
    }
