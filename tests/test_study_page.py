"""The figures of docs/study.md, docs/environments.md and docs/troubleshooting.md are those of the values per run."""

from __future__ import annotations

import json
import re
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from scipy.stats import linregress

from dapo_runner.cli import main
from dapo_runner.tools.study.figures import entropy_points
from dapo_runner.tools.study.results import PairedTest, by_variant, estimate, holm, load_results, paired_test
from docs import troubleshooting_pictures as pictures
from docs.search_effects import FILES, LADDER, conditional, endpoints, show, tables
from docs.search_effects import read as read_search
from docs.study_pictures import ROOT

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
WORDS = ("with", "without")
OUTSIDE = "Rows outside the factorial: measured minus predicted"
FRESH = "A seed that was not used before"
RARE = (("higher", "soft"), ("token", "dapo"))
BUDGETS = ("after", "at_equal_tokens")


def read(name: str) -> list[dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"study-{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def by_row(name: str, key: str) -> dict[str, list[float]]:
    """Return the values of each row of a study, seed by seed."""
    rows: dict[str, list[float]] = {}
    for run in sorted(read(name), key=lambda run: run["seed"]):
        rows.setdefault(run["variant"], []).append(run[key])
    return rows


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    rows = takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in list(rows)[2:]]


def spread(points: list[float]) -> str:
    found = estimate(points)
    assert found is not None
    return f"{100 * found.mean:.1f} ± {100 * (found.error or 0.0):.1f}"


def compare(rows: dict[str, list[float]], row: str, other: str) -> PairedTest:
    found = paired_test(rows[row], rows[other])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return tables()


def test_the_tables_of_the_page_follow_from_the_curves(found: dict[str, list[str]]) -> None:
    whole = (FILES["ladder"].parent / "search-effects-20261126.md").read_text(encoding="utf-8").splitlines()
    assert not [line for rows in found.values() for line in rows if line not in whole]
    shown = [line for line in PAGE.splitlines() if line.startswith("|") and ("±" in line or "**" in line)]
    assert len(shown) > 40
    assert not [line for line in shown if line not in whole]


@pytest.mark.parametrize("study", ["ladder", "factorial", "controls", "noise", "lr", "questions", "weak"])
def test_the_pages_of_the_studies_follow_from_their_curves(study: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", f"studies/search-{study}", "--check", str(FILES[study])]) == 0, capsys.readouterr().out


def test_effects_in_the_text(found: dict[str, list[str]]) -> None:
    """The table of claims has the main effects without standard errors."""
    cells = {label: row.split(" | ") for row in found["Main effects"][2:] for label in [row.split(" | ")[0][2:]]}
    claims = table("## What the paper claims")
    for claim, row in zip(claims, cells.values(), strict=True):
        assert claim[3:5] == [re.sub(" ± [0-9.]+", "", row[place]) for place in (1, 3)]
    updates, cost = (conditional(values) for values in list(endpoints(read_search("factorial")).values())[:2])
    gains = [
        100 * mean(of[f"dynamic sampling {word} soft overlong punishment"]) for of in (updates, cost) for word in WORDS
    ]
    assert (
        "gains {:.1f} points with soft punishment and {:.1f} without it; at equal cost {:.1f}, and {:.1f}".format(
            *gains
        )
        in TEXT
    )


def test_figures_of_single_sentences(found: dict[str, list[str]]) -> None:
    outside = [row.split(" | ")[1].partition(" (")[0] for row in found[OUTSIDE][2:]]
    assert f"differs by {', '.join(outside[:-1])} and {outside[-1]} points" in TEXT
    assert all(cell.count("inside") == 1 for row in found[FRESH][2:] for cell in row.split(" | ")[1:])
    tokens = {
        row[2:].split(" | ")[0]: row.split(" | ")[1] for row in found["Main effects at equal generated tokens"][2:]
    }
    assert f"it gains {re.sub(' ± [0-9.]+', '', tokens['overlong filtering'])[1:].replace(' (', ' points (')}" in TEXT
    rates = endpoints(read_search("lr"))["equal updates"]
    steps = [
        [100 * (rates[f"{row}_2.5e-4", n] - rates[f"{above}_2.5e-4", n]) for n in (100, 101)] for above, row in RARE
    ]
    assert "loses {:.1f} and {:.1f} points".format(*(-step for step in steps[0])) in TEXT
    assert "gains {:.1f} and {:.1f}. Two seeds".format(*steps[1]) in TEXT


def test_accuracy_and_entropy() -> None:
    runs, shares, ends = by_variant(load_results(FILES["ladder"])), [], []
    for variant in ("grpo", "dapo"):
        entropy, accuracy = entropy_points(runs[variant])
        law, line = linregress(np.exp(entropy), accuracy), linregress(entropy, accuracy)
        shares.append((100 * law.rvalue**2, 100 * line.rvalue**2))
        ends.append(100 * (law.intercept + law.slope))
    assert "{:.0f} % of the variance for naive GRPO and {:.0f} % for DAPO".format(*(law for law, _ in shares)) in TEXT
    assert "a straight line {:.0f} and {:.0f} %".format(*(line for _, line in shares)) in TEXT
    assert "it expects {:.1f} and {:.1f} %".format(*ends) in TEXT


def test_the_task_without_entropy(capsys: pytest.CaptureFixture[str]) -> None:
    name = "table1-20261126"
    values = ROOT / "benchmarks" / "results" / f"study-{name}.json"
    assert main(["study", "studies/table1", "--check", str(values)]) == 0, capsys.readouterr().out
    clipped = [100 * mean(run["curves"]["train/clip_high"][1]) for run in read(name)]
    assert f"{min(clipped):.2f} to {max(clipped):.2f} % of the tokens meet the upper clip bound" in TEXT
    tests = [compare(by_row(name, budget), row, above) for budget in BUDGETS for above, row in pairwise(LADDER)]
    updates, tokens = (show(test) for test in tests[4::5])
    assert f"changed accuracy by {updates} points at equal updates and by {tokens} at equal tokens" in TEXT
    assert f"Holm p {holm([test.p or 0.0 for test in tests])[-1]:.4f}" in TEXT


def test_the_small_language_model() -> None:
    found = {key: by_row("smollm2-20261122", key) for key in (*BUDGETS, "tokens", "cut_last")}
    after = {name: spread(found["after"][name]) for name in ("grpo", "dapo")}
    assert f"naive GRPO solves {after['grpo']} % and DAPO {after['dapo']} %" in TEXT
    assert f"it solved {spread(found['at_equal_tokens']['dapo'])} %" in TEXT
    tokens, cut = ({name: mean(values) for name, values in found[key].items()} for key in ("tokens", "cut_last"))
    assert f"generated {tokens['dapo'] / tokens['grpo']:.1f} times as many tokens" in TEXT
    assert f"{100 * cut['grpo']:.0f} % of its last responses are truncated, and {100 * cut['dapo']:.0f} % of" in TEXT


@pytest.mark.parametrize(("name", "side_by_side"), [("table1-20261126", 2), ("smollm2-20261122", 2)])
def test_how_long_the_studies_took(name: str, side_by_side: int) -> None:
    """The seconds of all runs, shared by those side by side."""
    seconds = [float(run["seconds"]) for run in read(name)]
    minutes = sum(seconds) / side_by_side / 60
    assert f"{len(seconds)} runs, {minutes:.0f} minutes" in TEXT


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
