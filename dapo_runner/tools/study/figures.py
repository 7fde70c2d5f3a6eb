"""The pictures of a study: the mean of several seeds as a line, its standard error as a band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dapo_runner.config import FigureConfig, StudyConfig, VariantConfig
from dapo_runner.logging.metric_table import BLUE, GREEN, GREY, ORANGE, RED
from dapo_runner.tools.study.results import Result, Series

Line = np.ndarray[tuple[int], np.dtype[np.float64]]

COLORS = (BLUE, ORANGE, GREEN, RED, GREY, "#CC79A7", "#56B4E9", "#000000")
AXES = {"step": "rollout step", "tokens": "tokens generated", "updates": "updates", "seconds": "seconds"}
POINTS = 200  # of a line, where the seeds have places of their own on the axis


def draw_figure(
    figure: FigureConfig, study: StudyConfig, found: Mapping[str, Sequence[Result]], folder: Path
) -> Path | None:
    """Into ``folder``; None where no run of its variants is done."""
    if not any(found.get(name) for name in figure.variants):
        return None
    labels = {variant.name: label_of(variant) for variant in study.variants}
    canvas = Figure(figsize=(4.6 * len(figure.curves), 3.4), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    canvas.suptitle(figure.title, fontsize=12, fontweight="bold")
    for ax, key in zip(canvas.subplots(1, len(figure.curves), squeeze=False).flat, figure.curves, strict=True):
        ax.set_title(key, fontsize=10, loc="left")
        ax.set_xlabel(AXES[figure.x], fontsize=8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        for name, color in zip(figure.variants, cycle(COLORS)):
            _draw(ax, found.get(name, []), key, figure.x, color, labels[name])
        if not ax.lines:
            ax.text(0.5, 0.5, "not logged", ha="center", color=GREY, transform=ax.transAxes)
    lines = {str(line.get_label()): line for ax in canvas.axes for line in ax.lines}
    canvas.legend(lines.values(), lines, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    path = folder / f"{figure.name}.png"
    canvas.savefig(path)
    return path


def label_of(variant: VariantConfig) -> str:
    return variant.label or variant.name


def _draw(ax: Axes, results: Sequence[Result], key: str, x: str, color: str, label: str) -> None:
    band = mean_and_error([result.series(key, x) for result in results])
    if band is None:
        return
    places, mean, error = band
    ax.plot(places, mean, color=color, label=label, linewidth=1.4)
    ax.fill_between(places, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)


def mean_and_error(series: Sequence[Series]) -> tuple[Line, Line, Line] | None:
    """Over the stretch of the axis that every seed has: at their own places where those are the same, else at places
    between which each is interpolated. The standard error of one seed is 0.
    """
    lines = [(np.asarray(places), np.asarray(values)) for places, values in series if places]
    if not lines:
        return None
    grid = lines[0][0]
    if any(not np.array_equal(places, grid) for places, _ in lines):
        low, high = max(places[0] for places, _ in lines), min(places[-1] for places, _ in lines)
        grid = np.linspace(low, max(low, high), POINTS)
    values = np.stack([np.interp(grid, *line) for line in lines])
    error = values.std(0, ddof=1) / np.sqrt(len(lines)) if len(lines) > 1 else np.zeros(len(grid))
    return grid, values.mean(0), error
