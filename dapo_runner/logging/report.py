"""`dapo report RUN`: the curves of a run as one picture, small multiples over the rollout step."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dapo_runner.logging.curves import Points, find_curve, read_curves
from dapo_runner.logging.metric_table import GREY, PANELS, Metric, Panel, panels_of
from dapo_runner.logging.metrics import METRICS_FILE

REPORT_FILE = "report.png"
COLUMNS = 3

Found = list[tuple[Metric, str, list[int], list[float]]]
"""A curve of a panel, what its star stands for, steps and values."""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Draw the logs of a run into ``out``, by default `report.png` in its folder. Returns the path.

    Raises FileNotFoundError without a log, ValueError for an empty one.
    """
    log = run_dir / METRICS_FILE
    if not log.is_file():
        raise FileNotFoundError(f"{log}: expected the metrics of a run, got no file")
    points = read_curves(run_dir)
    if not points:
        raise ValueError(f"{log}: expected at least one step, got an empty log")
    out = out or run_dir / REPORT_FILE
    draw(points, title=run_dir.name).savefig(out)
    return out


def draw(points: Points, title: str) -> Figure:
    """Draw all panels. One without data says so: the picture always has the same shape."""
    panels = panels_of(points)
    rows = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(4.3 * COLUMNS, 2.9 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    steps = [step for key in points for step in points[key][0]]
    margin = max(0.5, 0.03 * (max(steps) - min(steps)))
    for panel, ax in zip_longest(panels, figure.subplots(rows, COLUMNS).flat):
        if panel is None:
            ax.remove()
            continue
        ax.set_xlabel("rollout step" if panels is PANELS else "update", fontsize=8)
        ax.set_xlim(min(steps) - margin, max(steps) + margin)
        _draw_panel(ax, panel, points)
    return figure


def _draw_panel(ax: Axes, panel: Panel, points: Points) -> None:
    ax.set_title(panel.title, fontsize=10, loc="left")
    ax.set_ylabel(panel.unit, fontsize=8)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    if panel.share:
        ax.set_ylim(-0.02, 1.02)
    found = [(curve, *match) for curve in panel.curves if (match := find_curve(points, curve.key)) is not None]
    if not found:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "nothing logged", transform=ax.transAxes, ha="center", va="center", color=GREY, fontsize=9)
        return
    (_draw_stack if panel.stacked else _draw_lines)(ax, found)
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    if len(found) > 1:  # above the axes, where it hides no curve
        place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98)}
        ax.legend(fontsize=7, frameon=False, ncols=len(found), handlelength=1.2, columnspacing=1.0, **place)


def _draw_lines(ax: Axes, found: Found) -> None:
    for curve, suffix, steps, values in found:
        # Few points are shown as points: a line through one of them would be invisible.
        marker = "o" if len(steps) <= 40 else ""
        label = curve.label + suffix
        ax.plot(steps, values, color=curve.color, label=label, linewidth=1.4, marker=marker, markersize=3)
    if len(found) == 1 and found[0][1]:
        ax.set_ylabel(f"{found[0][0].label}{found[0][1]}", fontsize=8)


def _draw_stack(ax: Axes, found: Found) -> None:
    bottom = [0.0] * len(found[0][2])
    for curve, _, steps, values in found:
        ax.bar(steps, values, bottom=bottom, width=1.0, color=curve.color, label=curve.label, linewidth=0)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
