"""Draw the picture of docs/trl.md from the values per update: `python -m docs.trl_pictures`."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from docs.study_pictures import ROOT, draw_differences

VALUES = ROOT / "benchmarks" / "results" / "trl-sampling-intel-r-xeon-r-processor-2c-avx512bf16.json"
PICTURE = ROOT / "docs" / "trl-sampling.png"
ALONE, DYNAMIC = "TRL alone", "with dynamic sampling"
COLORS = {ALONE: "#7f8c8d", DYNAMIC: "#c0392b"}
LAST = 10  # updates, over which the share of correct responses is taken
Steps = list[dict[str, int]]


def correct(steps: Steps) -> float:
    """Return the correct responses in percent of all that were generated."""
    return 100 * sum(step["correct"] for step in steps) / sum(step["n"] for step in steps)


def thousands(steps: Steps) -> list[float]:
    """Return the tokens that were generated up to each update."""
    return list(accumulate(step["tokens"] / 1000 for step in steps))


def differences(runs: dict[str, dict[str, Steps]]) -> dict[str, list[float]]:
    """Return, seed by seed, the points that dynamic sampling gains over the last updates."""
    found: dict[str, list[float]] = {"equal steps": [], "equal tokens": []}
    for sides in runs.values():
        dynamic, alone = sides[DYNAMIC], sides[ALONE]
        budget = thousands(dynamic)[-1]
        n_within = 1 + sum(tokens < budget for tokens in thousands(alone))
        for name, length in zip(found, (len(dynamic), n_within), strict=True):
            found[name].append(correct(dynamic[-LAST:]) - correct(alone[:length][-LAST:]))
    return found


def draw(path: Path = PICTURE) -> None:
    runs = json.loads(VALUES.read_text(encoding="utf-8"))["runs"]
    canvas = Figure(figsize=(12, 3.2), dpi=100, layout="constrained")
    *curves, last = canvas.subplots(1, len(runs) + 1)
    for ax, (seed, sides) in zip(curves, runs.items(), strict=True):
        for side, color in COLORS.items():
            steps = sides[side]
            windows = [steps[max(0, at - LAST // 2) : at + LAST // 2] for at in range(len(steps))]
            ax.plot(thousands(steps), [correct(window) for window in windows], color=color, label=side)
        ax.sharey(curves[0])
        ax.set_title(f"seed {seed}", fontsize=10)
        ax.set_xlabel("generated tokens (thousands)", fontsize=9)
        ax.set_ylabel("correct responses (%)", fontsize=9)
        ax.label_outer()
    curves[0].legend(fontsize=8, frameon=False)
    found = differences(runs)
    draw_differences(last, found)
    for place, points in enumerate(found.values()):
        for seed, gain in zip(runs, points, strict=True):
            last.annotate(seed, (gain, -place), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    last.set_ylim(-1.5, 0.5)
    last.set_title("difference at the end, by seed", fontsize=10)
    last.set_xlabel("correct responses (points)", fontsize=9)
    canvas.savefig(path)


if __name__ == "__main__":
    draw()
