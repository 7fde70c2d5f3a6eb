"""Draw the pictures of docs/study.md from the values per run: `python -m docs.study_pictures`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from dapo_runner.config import StudyConfig, parse, read_recipe
from dapo_runner.tools.study.figures import draw_entropy_fit, draw_figure
from dapo_runner.tools.study.results import by_variant, load_results
from docs.search_effects import FILES, STUDIES, Contrasts, Values, effects, endpoints, planned, read, rungs

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "study"


def draw_differences(ax: Axes, found: Mapping[str, list[float]]) -> None:
    """Draw a row for each entry: a point per seed, and a line at their mean."""
    for place, points in enumerate(found.values()):
        ax.plot(points, [-place] * len(points), "o", color="C0", alpha=0.6, markersize=5)
        ax.plot(sum(points) / len(points), -place, "|", color="black", markersize=18)
    ax.axvline(0, color="grey", linewidth=0.8)
    ax.set_yticks([-place for place in range(len(found))], list(found))


def draw(path: Path, found: Mapping[str, Values], contrasts: Callable[[Values], Contrasts], unit: str) -> None:
    """Draw the contrasts of a study: a panel for each endpoint, a row for each contrast, a point for each seed."""
    rows = len(contrasts(next(iter(found.values()))))
    canvas = Figure(figsize=(11.5, 1.2 + 0.4 * rows), dpi=110, layout="constrained")
    for ax, (name, values) in zip(canvas.subplots(1, len(found), sharey=True), found.items(), strict=True):
        draw_differences(ax, {label: [100 * x for x in points] for label, points in contrasts(values).items()})
        ax.set_title(name if name.startswith("pass") else f"avg@16 at {name}", fontsize=10)
        ax.set_xlabel(unit, fontsize=9)
    canvas.savefig(path)


def draw_curves(folder: Path = FOLDER) -> None:
    """Draw the figures of the ladder with fewer colors than they are drawn in, a fourth of the bytes, and its fit."""
    study = parse(read_recipe(STUDIES / "search-ladder.yaml"), StudyConfig)
    found = by_variant(load_results(FILES["ladder"]))
    draw_entropy_fit(study, found, folder)
    for figure in study.figures:
        path = draw_figure(figure, study, found, folder)
        assert path is not None
        Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    draw(FOLDER / "search-ladder.png", endpoints(read("ladder")), rungs, "difference to the row above (points)")
    draw(FOLDER / "search-factors.png", endpoints(read("factorial")), effects, "main effect (points)")
    draw(FOLDER / "search-questions.png", endpoints(read("questions")), partial(planned, "search-questions"), "points")
    draw_curves()
