"""The figures of docs/study.md, docs/environments.md and docs/troubleshooting.md are those of the values per run."""

from __future__ import annotations

import json
import re
from itertools import dropwhile, takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

from docs import troubleshooting_pictures as pictures  # noqa: E402
from docs.study_pictures import BUDGETS, LADDER, ROOT, differences  # noqa: E402

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
TRICKS = ["whole", "group_mean", "batch_std", "batch_mean", "by_sequence", "clip", "short", "short_filter"]
TRICKS += ["long", "long_filter", "top_entropy", "clip_cov", "kl_cov", "gspo", "cispo"]
CLIPS = ["clip_020", "clip_024", "clip_032"]  # rows that share a line of the table


def read(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"study-{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def by_row(name: str, key: str, scale: float = 1.0) -> dict[str, list[float]]:
    """Return the values of each row of a study, seed by seed."""
    rows: dict[str, list[float]] = {}
    for run in sorted(read(name), key=lambda run: run["seed"]):
        rows.setdefault(run["variant"], []).append(scale * run[key])
    return rows


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    rows = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in list(rows)[2:]]


def error(points: list[float]) -> float:
    return stdev(points) / len(points) ** 0.5


def spread(points: list[float]) -> str:
    return f"{mean(points):.1f} ± {error(points):.1f}"


def p_value(gains: list[float]) -> float:
    return float(stats.ttest_1samp(gains, 0.0).pvalue)


def difference(gains: list[float]) -> str:
    """Return the mean of paired differences with its standard error and 95 % interval, as the page shows it."""
    reach = stats.t.ppf(0.975, len(gains) - 1) * error(gains)
    figures = f"{mean(gains):+.1f} ± {error(gains):.1f} ({mean(gains) - reach:+.1f} to {mean(gains) + reach:+.1f})"
    return figures.replace("-", "−")


def subtract(one: list[float], other: list[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def holm(p_values: list[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm 1979), in their order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def test_the_ladder_from_grpo_to_dapo() -> None:
    for row, (label, _, *cells) in zip(LADDER, table("## Table 1\n"), strict=True):
        assert LADDER[row] == label
        assert cells == [spread(by_row("table1-20261122", budget, 100)[row]) for budget in BUDGETS]
    runs = read("table1-20261122")
    gains = [differences({(run["variant"], run["seed"]): run[budget] for run in runs}) for budget in BUDGETS]
    corrected = iter(holm([p_value(points) for rows in gains for points in rows.values()]))
    lines = table("\n| | equal updates | p | Holm |")
    for place, rows in enumerate(gains):
        for cells, points in zip(lines, rows.values(), strict=True):
            shown, *p_values = cells[1 + 3 * place : 4 + 3 * place]
            assert shown == difference(points)
            assert list(map(float, p_values)) == pytest.approx([p_value(points), next(corrected)], rel=0.05)


def test_prompt_means_against_token_means() -> None:
    lines = table("## Eq. 8")
    for place, budget in enumerate(BUDGETS):
        rows = by_row("prompt-mean-20261124", budget, 100)
        gains = subtract(rows["prompt_mean"], rows["dapo"])
        expected = [spread(rows["dapo"]), spread(rows["prompt_mean"]), difference(gains)]
        assert [line[1 + place] for line in lines] == expected


def test_the_parts_one_by_one() -> None:
    rows = by_row("tricks-20261122", "after", 100)
    lines = table("## DAPO's parts, one by one\n")
    for name, (_, after, gain, p) in zip(TRICKS, lines, strict=True):
        variants = CLIPS if name == "clip" else [name]
        show = (lambda points: f"{mean(points):.1f}") if name == "clip" else spread
        assert after == ", ".join(show(rows[row]) for row in variants)
        if name != "whole":
            base = rows[name.removesuffix("_filter") if name.endswith("_filter") else "whole"]
            gains = [subtract(rows[row], base) for row in variants]
            shown = ", ".join(f"{mean(one):+.1f} ± {error(one):.1f}" for one in gains).replace("-", "−")
            assert gain.removesuffix(" to the row above") == shown
            assert [float(x) for x in p.split(", ")] == pytest.approx(list(map(p_value, gains)), rel=0.05)


def test_the_small_language_model() -> None:
    keys = [*BUDGETS, "tokens", "seconds", "entropy_first", "entropy_last", "cut_last"]
    found = {key: by_row("smollm2-20261122", key) for key in keys}
    for name, cells in zip(("grpo", "dapo"), table("## A small language model\n"), strict=True):
        accuracy = [spread([100 * value for value in found[key][name]]) for key in BUDGETS]
        tokens, seconds, first, last, cut = (mean(found[key][name]) for key in keys[len(BUDGETS) :])
        figures = [f"{tokens / 1000:.0f} thousand", f"{seconds:.0f}", f"{first:.1f} → {last:.1f}", f"{100 * cut:.0f} %"]
        assert cells[1:] == [*accuracy, *figures]


@pytest.mark.parametrize(
    ("name", "side_by_side"),
    [("table1-20261122", 2), ("prompt-mean-20261124", 1), ("tricks-20261122", 2), ("smollm2-20261122", 2)],
)
def test_how_long_the_studies_took(name: str, side_by_side: int) -> None:
    """The seconds of all runs, shared by those side by side."""
    runs = read(name)
    minutes = sum(float(run["seconds"]) for run in runs) / side_by_side / 60
    line = next(line for line in PAGE.splitlines() if line.startswith(f"dapo study studies/{name.rpartition('-')[0]} "))
    assert f"{len(runs)} runs, {minutes:.0f} minutes" in line


@pytest.mark.parametrize(
    ("study", "curve", "scale", "offset", "figures"),
    [
        ("calculator", "eval/avg@4", 100, 0, "from {0:.1f} % to {1:.1f} %"),
        ("calculator", "eval/turns", 100, -100, "from {0:.0f} % to {1:.0f} %"),
        ("guess", "eval/turns", 1, 0, "from {0:.2f} to {1:.2f}"),
    ],
)
def test_figures_of_the_environments(study: str, curve: str, scale: float, offset: float, figures: str) -> None:
    """Means over five seeds of a curve's first and last values."""
    page = " ".join((ROOT / "docs" / "environments.md").read_text(encoding="utf-8").split())
    curves = [run["curves"][curve][1] for run in read(f"{study}-20261125")]
    assert len(curves) == 5
    ends = (scale * mean(values[place] for values in curves) + offset for place in (0, -1))
    assert figures.format(*ends) in page


def test_troubleshooting_has_a_picture_and_the_setting_of_each_case(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    runs = json.loads(pictures.VALUES.read_text(encoding="utf-8"))["runs"]
    assert {case: run["overrides"] for case, run in runs.items()} == {c: pictures.settings_of(c) for c in runs}
    assert pictures.DRAWN.keys() == pictures.CASES.keys() - {pictures.HEALTHY}
    for case in pictures.DRAWN:
        section = " ".join(sections[case].split())
        assert f"]({pictures.FOLDER.name}/{pictures.file_of(case).name})" in section
        assert pictures.file_of(case).is_file()
        assert all(f"`{override}`" in section for override in pictures.CASES[case])
        pictures.draw_case(case, {name: run["curves"] for name, run in runs.items()}, tmp_path / "case.png")
        assert (tmp_path / "case.png").read_bytes().startswith(b"\x89PNG")
