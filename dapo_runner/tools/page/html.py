"""The page of runs in one file: curves, and rollouts token by token. It asks no network for anything.

Model output may be hostile. It enters the file as base64 of the compressed rollouts and the text of the page only as
text of elements; a policy in the file's head lets no script run but the two that are its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from dapo_runner.errors import ConfigError
from dapo_runner.files import atomic_write
from dapo_runner.logging.curves import read_curves
from dapo_runner.logging.metric_table import Panel, panels_of
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps

HTML_FILE = "report.html"


def write_page(runs: Sequence[Path], out: Path | None = None, max_mb: float = 50.0) -> Path:
    """Write the page of ``runs`` to ``out`` (default: `report.html` in the first one's folder), with rollouts of at
    most ``max_mb``. Returns its path. Raises FileNotFoundError without a log, ConfigError without plotly.
    """
    for run in runs:
        if not (run / METRICS_FILE).is_file():
            raise FileNotFoundError(f"{run / METRICS_FILE}: expected the metrics of a run, found nothing there")
    data = contents(runs)
    for run, shown in zip(runs, data["runs"], strict=True):
        steps = saved_steps(run / ROLLOUTS)
        chosen = spread_steps({step: path.stat().st_size for step, path in steps.items()}, max_mb * 1e6 / len(runs))
        shown["rollouts"] = {step: base64.b64encode(steps[step].read_bytes()).decode() for step in chosen}
        shown |= {"steps": chosen, "kept": len(steps)}
    out = out or runs[0] / HTML_FILE
    atomic_write(out, render(data))
    return out


def contents(runs: Sequence[Path]) -> dict[str, Any]:
    """Return, as JSON has it, the panels and of each run its name, its curves and the steps whose rollouts are kept."""
    parent = os.path.commonpath([run.resolve().parent for run in runs])
    shown = []
    panels: dict[Panel, None] = {}
    for run in runs:
        points = read_curves(run)
        panels |= dict.fromkeys(panels_of(points))
        finite = {
            key: (steps, [value if math.isfinite(value) else None for value in values])
            for key, (steps, values) in points.items()
        }
        name = str(run.resolve().relative_to(parent))
        shown.append({"name": name, "curves": finite, "steps": list(saved_steps(run / ROLLOUTS))})
    return {"panels": [asdict(panel) for panel in panels], "runs": shown}


def spread_steps(sizes: dict[int, int], room: float) -> list[int]:
    """Return the last step and every n-th before it, for the smallest n whose ``sizes`` (ascending by step) fit."""
    steps = list(sizes)[::-1]
    for n in range(1, len(steps) + 1):
        if sum(sizes[step] for step in steps[::n]) <= room:
            return steps[::n][::-1]
    return []


def render(data: dict[str, Any], live: bool = False) -> str:
    """Return the page that shows ``data``; ``live``: it asks its server for rollouts and for what is new."""
    plotly, script = plotly_source(), _part("page.js")
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in (plotly, script))
    network = "'self'" if live else "'none'"
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {network}; base-uri 'none'; form-action 'none'",
        "title": "dapo watch" if live else "dapo report",
        "style": _part("page.css"),
        # Nothing in it can end the element that holds it.
        "data": json.dumps(data | {"live": live}, allow_nan=False).replace("<", "\\u003c"),
        "plotly": plotly,
        "script": script,
    }
    pieces = _part("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def plotly_source() -> str:
    """Return the charts' library. Raises ConfigError where it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("the page requires plotly. pip install 'dapo-kernels[html]'") from error
    return str(get_plotlyjs())


def _part(name: str) -> str:
    return (resources.files("dapo_runner.tools.page") / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
