"""Accuracy against entropy, R = −a·exp(H) + b (Cui et al. 2025, arXiv 2505.22617, eq. 1): what a policy pays for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dapo_runner.config import StudyConfig
from dapo_runner.tools.study.figures import COLORS, label_of
from dapo_runner.tools.study.results import Result

ENTROPY = "train/entropy"
PICTURE = "entropy_fit.png"
HEAD = "| | a | b | b − a, accuracy without entropy | R² | evaluations |\n|---|---:|---:|---:|---:|---:|"


@dataclass(frozen=True, slots=True)
class EntropyFit:
    """By least squares; ``explained`` is R², the share of the accuracies' variance that the curve explains."""

    a: float
    b: float
    explained: float
    n: int

    def __call__(self, entropy: np.ndarray) -> np.ndarray:
        return -self.a * np.exp(entropy) + self.b


def points(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and accuracy at each evaluation after a step, of all seeds."""
    found = []
    for result in results:
        entropy = dict(zip(*result.series(ENTROPY, "step"), strict=True))
        accuracy = zip(*result.series(result.metric, "step"), strict=True)
        found += [(entropy[step], value) for step, value in accuracy if step in entropy]
    return np.array([h for h, _ in found]), np.array([r for _, r in found])


def fit(entropy: np.ndarray, accuracy: np.ndarray) -> EntropyFit | None:
    """None where there are fewer than three evaluations, or none differs from the others in entropy or accuracy."""
    if len(entropy) < 3 or not np.ptp(entropy) or not np.ptp(accuracy):
        return None
    slope, b = np.polyfit(np.exp(entropy), accuracy, 1)
    left = accuracy - (slope * np.exp(entropy) + b)
    return EntropyFit(float(-slope), float(b), float(1 - left.var() / accuracy.var()), len(entropy))


def write_entropy_fit(study: StudyConfig, found: Mapping[str, Sequence[Result]], folder: Path) -> str:
    """The picture, into ``folder``, and what the page says of it; empty where no variant's run is done."""
    canvas = Figure(figsize=(6.4, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    ax = canvas.subplots()
    ax.set_xlabel("entropy, nats per token", fontsize=9)
    ax.set_ylabel("accuracy", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    rows = []
    variants = [variant for variant in study.variants if variant.name in study.entropy_fit]
    for variant, color in zip(variants, cycle(COLORS)):
        entropy, accuracy = points(found.get(variant.name, []))
        fitted = fit(entropy, accuracy)
        if fitted is None:
            continue
        line = np.linspace(entropy.min(), entropy.max(), 100)
        ax.plot(entropy, accuracy, ".", color=color, alpha=0.4, markersize=4)
        ax.plot(line, fitted(line), color=color, linewidth=1.6, label=label_of(variant))
        figures = (f"{x:.3f}" for x in (fitted.a, fitted.b, fitted.b - fitted.a, fitted.explained))
        rows.append(f"| {label_of(variant)} | {' | '.join(figures)} | {fitted.n} |")
    if not rows:
        return ""
    ax.legend(fontsize=8, frameon=False)
    canvas.savefig(folder / PICTURE)
    return "\n".join([f"![Accuracy and entropy]({PICTURE})", "", HEAD, *rows])
