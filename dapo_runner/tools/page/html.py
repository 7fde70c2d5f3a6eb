"""Write the page of runs as one file, with curves and with rollouts token by token. It makes no network requests.

Model output may be malicious. It is in the file as base64 of the compressed rollouts, and is shown only as the text of
elements. A content security policy allows no scripts but the page's own two.
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

from dapo_runner.config import ConfigError, flatten, read_recipe
from dapo_runner.config.reading import CONFIG_FILE
from dapo_runner.files import atomic_write
from dapo_runner.logging.curves import read_curves
from dapo_runner.logging.metric_table import SUPERVISED_PANELS, Panel, panels_of, read_glossary, step_name
from dapo_runner.logging.metrics import METRICS_FILE
from dapo_runner.logging.rollout_log import ROLLOUTS, saved_steps

HTML_FILE = "report.html"
ABOUT = ("algorithm", "data.format", "data.path", "loss.objective", "model.path", "model.tiny.layers")  # in the header


def write_page(runs: Sequence[Path], out: Path | None = None, max_mb: float = 50.0) -> Path:
    """Write the page of ``runs`` to ``out`` (default: `report.html` in the folder of the first) with at most ``max_mb``
    of rollouts. Return its path. Raises ConfigError without a log or plotly.
    """
    for run in runs:
        if not (run / METRICS_FILE).is_file():
            raise ConfigError(f"{run / METRICS_FILE}: expected the metrics of a run, found nothing")
    data = contents(runs)
    for run, shown in zip(runs, data["runs"], strict=True):
        steps = saved_steps(run / ROLLOUTS)
        chosen = spread_steps({step: path.stat().st_size for step, path in steps.items()}, max_mb * 0.75e6 / len(runs))
        shown["rollouts"] = {step: base64.b64encode(steps[step].read_bytes()).decode() for step in chosen}
        shown |= {"steps": chosen, "saved": len(steps)}
    out = out or runs[0] / HTML_FILE
    atomic_write(out, render(data))
    return out


def contents(runs: Sequence[Path]) -> dict[str, Any]:
    """Return panels and meanings of metrics, and of each run its name, curves, steps with saved rollouts, and the
    settings for its header: those of ``ABOUT`` and those in which the runs differ, as JSON.
    """
    parent = os.path.commonpath([os.path.abspath(run / os.pardir) for run in runs])
    recipes = [flatten(read_recipe(run / CONFIG_FILE)) if (run / CONFIG_FILE).is_file() else {} for run in runs]
    values = {key: {str(recipe.get(key)) for recipe in recipes if recipe} for key in set().union(*recipes)}
    differing = sorted(key for key in values if len(values[key]) > 1 and key not in (*ABOUT, "run.name"))
    shown = []
    panels: dict[Panel, None] = {}
    for run, settings in zip(runs, recipes, strict=True):
        points = read_curves(run)
        panels |= dict.fromkeys(panels_of(points))
        finite = {
            key: (steps, [float(f"{value:.6g}") if math.isfinite(value) else None for value in values])
            for key, (steps, values) in points.items()
        }
        about = {key: settings[key] for key in ABOUT if settings.get(key) is not None}
        differences = {key: settings[key] for key in differing if key in settings}
        header = {"name": os.path.relpath(run, parent), "about": about, "differences": differences}
        shown.append(header | {"curves": finite, "steps": list(saved_steps(run / ROLLOUTS))})
    if SUPERVISED_PANELS[0] in panels and not panels.keys() <= {*SUPERVISED_PANELS}:
        raise ConfigError("RUN: expected runs of one command, got dapo sft and dapo train. Give each a page.")
    meanings = {key: f"{text} Healthy: {healthy or 'any value'}." for key, _, text, healthy in read_glossary()}
    return {"panels": [*map(asdict, panels)], "step": step_name(panels), "meanings": meanings, "runs": shown}


def spread_steps(sizes: dict[int, int], room: float) -> list[int]:
    """Return the last step and every n-th before it, with the smallest n for which the sum of ``sizes`` fits."""
    steps = list(sizes)[::-1]
    for n in range(1, len(steps) + 1):
        if sum(sizes[step] for step in steps[::n]) <= room:
            return steps[::n][::-1]
    return []


def render(data: dict[str, Any], live: bool = False) -> str:
    """Return the page with ``data``. A ``live`` page asks its server for rollouts and updates."""
    plotly, script = plotly_source(), _part("page.js")
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (plotly, script))
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    network = "'self'" if live else "'none'"
    parts = {
        "policy": f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {network}; base-uri 'none'; form-action 'none'",
        "title": "dapo watch" if live else "dapo report",
        "style": _part("page.css"),
        # Escaped, so that it cannot close its script element.
        "data": json.dumps(data | {"live": live}, allow_nan=False).replace("<", "\\u003c"),
        "plotly": plotly,
        "script": script,
    }
    pieces = _part("page.html").split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def plotly_source() -> str:
    """Return the source of plotly. Raises ConfigError if it is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("plotly: the page requires it. pip install 'dapo-kernels[html]'") from error
    return str(get_plotlyjs())


def _part(name: str) -> str:
    return (resources.files("dapo_runner.tools.page") / name).read_text(encoding="utf-8")
