"""`dapo report RUN`: draw the curves of a run as one picture with a panel per metric."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dapo_runner.errors import ConfigError
from dapo_runner.files import atomic_write
from dapo_runner.logging.curves import Points, find_curve, read_curves
from dapo_runner.logging.metric_table import Panel, panels_of, step_name
from dapo_runner.logging.metrics import METRICS_FILE

REPORT_FILE = "report.png"
COLUMNS = 3
MOST_BARS = 400  # each is an object, which takes 5 ms and 75 KiB


def write_report(run: Path, out: Path | None = None) -> Path:
    """Draw the logs of a run into ``out`` (default: `report.png` in its folder). Raises ConfigError without a log."""
    if not (points := read_curves(run)):
        raise ConfigError(f"{run / METRICS_FILE}: expected the metrics of a run, got no file or an empty one")
    out = out or run / REPORT_FILE
    figure = draw(points, title=run.absolute().name.encode(errors="replace").decode())
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of missing glyphs
        figure.savefig(data := BytesIO(), format=out.suffix[1:])
    atomic_write(out, data.getvalue())
    return out


def draw(points: Points, title: str) -> Figure:
    """Draw every panel that has data. The horizontal axis is the step."""
    zero = {key for key, (_, values) in points.items() if not any(values)}  # hidden by an axis that starts at 0
    panels = [p for p in panels_of(points) if not (p.from_zero and {c.key for c in p.curves} & points.keys() <= zero)]
    rows = max(1, -(-len(panels) // COLUMNS))
    figure = Figure(figsize=(4.3 * COLUMNS, 2.9 * rows), dpi=130, layout="constrained")
    figure.suptitle(title, parse_math=False, fontsize=13, fontweight="bold")
    steps = [step for curve in points.values() for step in curve[0]]
    margin = max(0.5, 0.03 * (max(steps) - min(steps)))
    cells = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for panel, ax in zip(panels, cells, strict=False):
        style(ax, panel.title, step_name(panels), panel.unit)
        ax.set_xlim(min(steps) - margin, max(steps) + margin)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
        _draw_curves(ax, panel, points)
    for ax in cells:  # those left over
        ax.remove()
    return figure


def style(ax: Axes, title: str, x_label: str, y_label: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x_label, fontsize=8)
    ax.set_ylabel(y_label, fontsize=8)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)


def _draw_curves(ax: Axes, panel: Panel, points: Points) -> None:
    bottom: list[float] = []
    found = [(curve, *match) for curve in panel.curves if (match := find_curve(points, curve.key)) is not None]
    for curve, suffix, steps, values in found:
        label = f"{curve.label}{suffix}"
        if panel.stacked:
            bottom = bottom or [0.0] * len(steps)
            top = [low + value for low, value in zip(bottom, values, strict=True)]
            if len(steps) <= MOST_BARS:
                ax.bar(steps, values, bottom=bottom, width=1.0, color=curve.color, label=label, linewidth=0)
            else:
                ax.fill_between(steps, bottom, top, step="mid", color=curve.color, label=label, linewidth=0)
            bottom = top
        else:  # with few points draw markers: a line through a single point is invisible
            marker = "o" if len(steps) <= 40 else ""
            ax.plot(steps, values, color=curve.color, label=label, linewidth=1.4, marker=marker, markersize=3)
    if panel.share:
        ax.set_ylim(-0.02, 1.02)
    elif panel.from_zero:
        ax.set_ylim(bottom=0)
    if len(panel.curves) > 1:  # place the legend above the axes, where it hides no curve
        place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "columnspacing": 0.6}
        ax.legend(fontsize=6, frameon=False, ncols=len(found), handlelength=0.8, handletextpad=0.3, **place)
