"""The pictures of a study: curves as the mean of the seeds with its standard error, and accuracy against entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import linregress

from dapo_runner.config import FigureConfig, StudyConfig, VariantConfig
from dapo_runner.logging.metric_table import BLUE, GREEN, GREY, ORANGE, RED, title_and_unit
from dapo_runner.logging.report import style
from dapo_runner.tools.study.results import MEANS, Result, Series

Line = np.ndarray[tuple[int], np.dtype[np.float64]]
Found = Mapping[str, Sequence[Result]]
"""The results of each variant, by its name."""

COLORS = (BLUE, ORANGE, GREEN, RED, GREY, "#CC79A7", "#56B4E9", "#000000")
AXES = {"step": "rollout step", "tokens": "tokens generated", "updates": "updates", "seconds": "seconds"}
POINTS = 200  # of a line, where the seeds have places of their own on the axis
ENTROPY_FIT = "entropy_fit.png"
FIT_HEAD = "| | a | b | b − a, accuracy without entropy | R² | evaluations |\n|---|---:|---:|---:|---:|---:|"


def label_of(variant: VariantConfig) -> str:
    return variant.label or variant.name


def draw_figure(figure: FigureConfig, study: StudyConfig, found: Found, folder: Path) -> Path | None:
    """Draw a panel for each curve into ``folder``; None where no run of its variants is done."""
    if not any(found.get(name) for name in figure.variants):
        return None
    labels = {variant.name: label_of(variant) for variant in study.variants}
    canvas = Figure(figsize=(4.6 * len(figure.curves), 3.4), dpi=130, layout="constrained")
    canvas.suptitle(figure.title, fontsize=12, fontweight="bold")
    for ax, key in zip(canvas.subplots(1, len(figure.curves), squeeze=False).flat, figure.curves, strict=True):
        title, unit = title_and_unit(key)
        style(ax, title, AXES[figure.x], unit)
        for name, color in zip(figure.variants, cycle(COLORS)):
            band = mean_and_error([result.series(key, figure.x) for result in found.get(name, [])])
            if band is not None:
                places, mean, error = band
                ax.plot(places, mean, color=color, label=labels[name], linewidth=1.4)
                ax.fill_between(places, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)
        if not ax.lines:
            ax.text(0.5, 0.5, "not logged", ha="center", color=GREY, transform=ax.transAxes)
    lines = {str(line.get_label()): line for ax in canvas.axes for line in ax.lines}
    canvas.legend(lines.values(), lines, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    canvas.savefig(folder / f"{figure.name}.png")
    return folder / f"{figure.name}.png"


def mean_and_error(series: Sequence[Series]) -> tuple[Line, Line, Line] | None:
    """Return places, mean and standard error over the part of the axis that every seed has: at their own places where
    those are the same, else interpolated. The standard error of one seed is 0.
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


def entropy_points(results: Sequence[Result]) -> tuple[Line, Line]:
    """Return entropy and accuracy at each evaluation after a step, of all seeds."""
    found = []
    for result in results:
        entropy = dict(zip(*result.series(MEANS["entropy"], "step"), strict=True))
        accuracy = zip(*result.series(result.metric, "step"), strict=True)
        found += [(entropy[step], value) for step, value in accuracy if step in entropy]
    entropies, accuracies = np.array(found).reshape(-1, 2).T
    return entropies, accuracies


def draw_entropy_fit(study: StudyConfig, found: Found, folder: Path) -> str:
    """Fit R = −a·exp(H) + b of accuracy R and entropy H (Cui et al. 2025, arXiv 2505.22617, eq. 1) and draw it into
    ``folder``. Returns the table of the fits, empty without three evaluations that differ.
    """
    canvas, rows = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained"), []
    ax = canvas.subplots()
    style(ax, "", "entropy, nats per token", "accuracy")
    variants = [variant for variant in study.variants if variant.name in study.entropy_fit]
    for variant, color in zip(variants, cycle(COLORS)):
        entropy, accuracy = entropy_points(found.get(variant.name, []))
        if len(entropy) < 3 or not np.ptp(entropy) or not np.ptp(accuracy):
            continue
        fit = linregress(np.exp(entropy), accuracy)
        line = np.linspace(entropy.min(), entropy.max(), 100)
        ax.plot(entropy, accuracy, ".", color=color, alpha=0.4, markersize=4)
        ax.plot(line, fit.intercept + fit.slope * np.exp(line), color=color, linewidth=1.6, label=label_of(variant))
        numbers = (-fit.slope, fit.intercept, fit.intercept + fit.slope, fit.rvalue**2)
        rows.append(f"| {label_of(variant)} | {' | '.join(f'{x:.3f}' for x in numbers)} | {len(entropy)} |")
    if not rows:
        return ""
    ax.legend(fontsize=8, frameon=False)
    canvas.savefig(folder / ENTROPY_FIT)
    return "\n".join([f"![Accuracy and entropy]({ENTROPY_FIT})", "", FIT_HEAD, *rows])
