"""Draw the pictures of docs/study.md from the values per run: `python -m docs.study_pictures`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from dapo_runner.config import StudyConfig, parse, read_recipe
from dapo_runner.tools.study.figures import draw_figure
from dapo_runner.tools.study.results import by_variant, load_results
from docs.search_effects import endpoints

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "benchmarks" / "results" / "study-table1-20261126.json"
CURVES = {"table1": VALUES, "prompt-mean": ROOT / "benchmarks" / "results" / "study-prompt-mean-20261124.json"}
SEARCH = ROOT / "benchmarks" / "results" / "search-ladder-20261126.json"
STUDIES = ROOT / "recipes" / "studies"
FOLDER = ROOT / "docs" / "study"
PICTURE = FOLDER / "differences.png"
LADDER = {
    "grpo": "naive GRPO",
    "filter": "+ overlong filtering",
    "higher": "+ clip-higher",
    "soft": "+ soft overlong punishment",
    "token": "+ token-level loss",
    "dapo": "+ dynamic sampling (DAPO)",
}
BUDGETS = {"after": "equal updates (800)", "at_equal_tokens": "equal generated tokens (1.92 million)"}


def differences(values: Mapping[tuple[str, int], float]) -> dict[str, list[float]]:
    """Return, for each row but the first, the points of accuracy it gains over the row above, seed by seed."""
    seeds, rows = sorted({seed for _, seed in values}), list(LADDER)
    return {row: [100 * (values[row, seed] - values[above, seed]) for seed in seeds] for above, row in pairwise(rows)}


def draw_differences(ax: Axes, found: Mapping[str, list[float]]) -> None:
    """Draw a row for each entry: a point per seed, and a line at their mean."""
    for place, points in enumerate(found.values()):
        ax.plot(points, [-place] * len(points), "o", color="C0", alpha=0.6, markersize=5)
        ax.plot(sum(points) / len(points), -place, "|", color="black", markersize=18)
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set_yticks([-place for place in range(len(found))], list(found))


def draw(path: Path = PICTURE) -> None:
    runs = json.loads(VALUES.read_text(encoding="utf-8"))
    canvas = Figure(figsize=(9.6, 3.2), dpi=110, layout="constrained")
    axes = canvas.subplots(1, len(BUDGETS), sharey=True, squeeze=False).flat
    for ax, (budget, title) in zip(axes, BUDGETS.items(), strict=True):
        found = differences({(run["variant"], run["seed"]): run[budget] for run in runs})
        draw_differences(ax, {LADDER[row]: points for row, points in found.items()})
        ax.set_title(f"at {title}", fontsize=10)
        ax.set_xlabel("held-out accuracy, difference to the row above (points)", fontsize=9)
    path.parent.mkdir(exist_ok=True)
    canvas.savefig(path)


def draw_search(path: Path = FOLDER / "search-ladder.png") -> None:
    """Draw the rungs of the ladder on the task with search: a panel for each endpoint."""
    found = endpoints(json.loads(SEARCH.read_text(encoding="utf-8")))
    canvas = Figure(figsize=(11.5, 3.2), dpi=110, layout="constrained")
    for ax, (name, values) in zip(canvas.subplots(1, len(found), sharey=True), found.items(), strict=True):
        draw_differences(ax, {LADDER[row]: points for row, points in differences(values).items()})
        ax.set_title(name if name.startswith("pass") else f"avg@16 at {name}", fontsize=10)
        ax.set_xlabel("difference to the row above (points)", fontsize=9)
    canvas.savefig(path)


def draw_curves(name: str, values: Path, folder: Path = FOLDER) -> None:
    """Draw the figures of a study from its JSON file, with fewer colors than it is drawn in: a fourth of the bytes."""
    study, found = parse(read_recipe(STUDIES / f"{name}.yaml"), StudyConfig), by_variant(load_results(values))
    for figure in study.figures:
        path = draw_figure(figure, study, found, folder)
        assert path is not None
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    draw()
    draw_search()
    for study, values in CURVES.items():
        draw_curves(study, values)
