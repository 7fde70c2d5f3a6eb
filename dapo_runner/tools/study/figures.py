"""The pictures of a study: means over seeds, differences per seed, and accuracy against entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import linregress

from dapo_runner.config.commands import FigureConfig, StudyConfig, VariantConfig
from dapo_runner.logging.metric_table import BLUE, GREEN, GREY, ORANGE, RED, title_and_unit
from dapo_runner.logging.report import style
from dapo_runner.tools.study.results import MEANS, Result, Series

Line = np.ndarray[tuple[int], np.dtype[np.float64]]
Lines = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Found = Mapping[str, Sequence[Result]]
"""The results of each variant by name."""

COLORS = (BLUE, ORANGE, GREEN, RED, GREY, "#CC79A7", "#56B4E9", "#000000")
AXES = {"step": "rollout step", "tokens": "tokens generated", "updates": "updates", "seconds": "seconds"}
WIDTH = 44  # of a panel, in letters of its title
POINTS = 200  # of an interpolated line, if the seeds have different positions on the axis
ENTROPY_FIT = "entropy_fit.png"
FIT_HEAD = "| | a | b | b − a, accuracy without entropy | R² | evaluations |\n|---|---:|---:|---:|---:|---:|"


def label_of(variant: VariantConfig) -> str:
    return variant.label or variant.name


def draw_figure(figure: FigureConfig, study: StudyConfig, found: Found, folder: Path) -> Path | None:
    """Draw a column for each curve into ``folder``: the mean of each variant over the seeds, and below it the
    difference of each further variant to the first one, per seed. Return the path, or None without a logged curve.
    """
    colors = {name: color for name, color in zip(figure.variants, cycle(COLORS)) if found.get(name)}
    curves = [key for key in figure.curves if any(run.series(key, figure.x)[0] for n in colors for run in found[n])]
    if not curves:
        return None
    labels = {variant.name: label_of(variant) for variant in study.variants}
    base, *others = colors
    size = (len(colors), len(curves))
    canvas = Figure(figsize=(4.6 * size[1], 0.8 + 2.7 * size[0]), dpi=130, layout="constrained")
    canvas.suptitle(figure.title, fontsize=12, fontweight="bold")
    for column, key in zip(canvas.subplots(*size, squeeze=False, sharex="col").T, curves, strict=True):
        title, unit = title_and_unit(key)
        runs = {name: {result.seed: result.series(key, figure.x) for result in found[name]} for name in colors}
        style(column[0], fill(title, WIDTH), "", unit)
        for name, color in colors.items():
            if (lines := align(list(runs[name].values()))) is not None:
                _draw_mean(column[0], *lines, color, labels[name], with_seeds=not others)
        for ax, name in zip(column[1:], others, strict=True):
            style(ax, fill(f"{labels[name]} minus {labels[base]}", WIDTH), "", f"difference, {unit}")
            ax.axhline(0, color=GREY, linewidth=0.8)
            if (lines := differences(runs[name], runs[base])) is not None:
                _draw_mean(ax, *lines, colors[name], labels[name], with_seeds=True)
        column[-1].set_xlabel(AXES[figure.x], fontsize=8)
    named = {label: line for ax in canvas.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    canvas.legend(named.values(), named, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    canvas.savefig(folder / f"{figure.name}.png")
    return folder / f"{figure.name}.png"


def _draw_mean(ax: Axes, places: Line, values: Lines, color: str, label: str, with_seeds: bool) -> None:
    """Draw a mean over seeds, with each seed as a thin line if ``with_seeds``."""
    if with_seeds:
        ax.plot(places, values.T, color=color, linewidth=0.6, alpha=0.5)
    ax.plot(places, values.mean(0), color=color, label=label, linewidth=1.6)


def differences(runs: Mapping[int, Series], others: Mapping[int, Series]) -> tuple[Line, Lines] | None:
    """Return positions, and ``runs`` − ``others`` with a row for each seed that both logged; None without one."""
    seeds = [seed for seed in runs if runs[seed][0] and others.get(seed, ((), ()))[0]]
    lines = align([*(runs[seed] for seed in seeds), *(others[seed] for seed in seeds)])
    return None if lines is None else (lines[0], lines[1][: len(seeds)] - lines[1][len(seeds) :])


def align(series: Sequence[Series]) -> tuple[Line, Lines] | None:
    """Return positions and a row of values for each seed, over the range that all seeds share. Values are interpolated
    if the positions differ. None without values.
    """
    lines = [(np.asarray(places), np.asarray(values)) for places, values in series if places]
    if not lines:
        return None
    grid = lines[0][0]
    if any(not np.array_equal(places, grid) for places, _ in lines):
        low, high = max(places[0] for places, _ in lines), min(places[-1] for places, _ in lines)
        grid = np.linspace(low, max(low, high), POINTS)
    return grid, np.stack([np.interp(grid, *line) for line in lines])


def entropy_points(results: Sequence[Result]) -> tuple[Line, Line]:
    """Return entropy and accuracy at each evaluation after a step, over all seeds."""
    found = []
    for result in results:
        entropy = dict(zip(*result.series(MEANS["entropy"], "step"), strict=True))
        accuracy = zip(*result.series(result.metric, "step"), strict=True)
        found += [(entropy[step], value) for step, value in accuracy if step in entropy]
    entropies, accuracies = np.array(found).reshape(-1, 2).T
    return entropies, accuracies


def draw_entropy_fit(study: StudyConfig, found: Found, folder: Path) -> str:
    """Fit R = −a·exp(H) + b to accuracy R and entropy H (Cui et al. 2025, arXiv 2505.22617, eq. 1) and draw it into
    ``folder``. Return the table of the fits; variants with fewer than three different evaluations are left out.
    """
    canvas, rows = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained"), []
    ax = canvas.subplots()
    style(ax, "", "entropy, nats per token", "accuracy, share of problems")
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
        label = label_of(variant).replace("|", r"\|")
        rows.append(f"| {label} | {' | '.join(f'{x:.3f}' for x in numbers)} | {len(entropy)} |")
    if not rows:
        return ""
    ax.legend(fontsize=8, frameon=False)
    canvas.savefig(folder / ENTROPY_FIT)
    return "\n".join([f"![Accuracy and entropy]({ENTROPY_FIT})", "", FIT_HEAD, *rows])
