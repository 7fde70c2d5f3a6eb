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
from dapo_runner.tools.study.results import by_variant, estimate, holm, load_results, paired_test
from docs import troubleshooting_pictures as pictures
from docs.search_effects import FILES, LADDER, RESULTS, conditional, endpoints, show, tables
from docs.search_effects import read as read_search
from docs.study_pictures import ROOT

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
TABLE1, SMOLLM2 = (RESULTS / f"study-{name}.json" for name in ("table1-20261126", "smollm2-20261122"))
RARE = (("higher", "soft"), ("token", "dapo"))
BUDGETS = ("after", "at_equal_tokens")


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def by_row(path: Path, key: str) -> dict[str, list[float]]:
    """Return the values of each row of a study, seed by seed."""
    rows: dict[str, list[float]] = {}
    for run in sorted(read(path), key=lambda run: run["seed"]):
        rows.setdefault(run["variant"], []).append(run[key])
    return rows


def assert_in_text(sentence: str, *figures: float, page: str = PAGE) -> None:
    assert sentence.format(*figures) in " ".join(page.split())


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return tables()


def without_errors(cell: str) -> str:
    return re.sub(" ± [0-9.]+", "", cell)


def test_the_tables_of_the_page_follow_from_the_curves(found: dict[str, list[str]]) -> None:
    whole = (RESULTS / "search-effects-20261126.md").read_text(encoding="utf-8").splitlines()
    assert not [line for rows in found.values() for line in rows if line not in whole]
    shown = [line for line in PAGE.splitlines() if line.startswith("|") and ("±" in line or "**" in line)]
    assert len(shown) > 40
    assert not [line for line in shown if line not in whole]


SEARCH = {f"search-{name}": FILES[name] for name in FILES if name != "fresh"}


@pytest.mark.parametrize(("study", "values"), [*SEARCH.items(), ("table1", TABLE1)], ids=[*SEARCH, "table1"])
def test_the_pages_of_the_studies_follow_from_their_curves(
    study: str, values: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", f"studies/{study}", "--check", str(values)]) == 0, capsys.readouterr().out


def test_effects_in_the_text(found: dict[str, list[str]]) -> None:
    """The table of claims has the main effects without standard errors."""
    lines = PAGE[PAGE.index("## What the paper claims") :].splitlines()
    claims = list(takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines)))
    effects = {row.split(" | ")[0]: row.split(" | ") for row in found["Main effects"][2:]}
    for claim, row in zip(claims[2:], effects.values(), strict=True):
        cells = [cell.strip() for cell in claim.strip("|").split("|")]
        assert cells[3:5] == [without_errors(row[place]) for place in (1, 3)]
    updates, cost = (conditional(values) for values in list(endpoints(read_search("factorial")).values())[:2])
    gains = [
        100 * mean(of[f"dynamic sampling {word} soft overlong punishment"])
        for of in (updates, cost)
        for word in ("with", "without")
    ]
    assert_in_text(
        "gains {:.1f} points with soft punishment and {:.1f} without it; at equal cost {:.1f}, and {:.1f}", *gains
    )
    outside = found["Rows outside the factorial: measured minus predicted"][2:]
    differences = [row.split(" | ")[1].partition(" (")[0] for row in outside]
    assert_in_text(f"differs by {', '.join(differences[:-1])} and {differences[-1]} points")
    fresh = found["A seed that was not used before"][2:]
    assert all(cell.count("inside") == 1 for row in fresh for cell in row.split(" | ")[1:])
    tokens = {
        row[2:].split(" | ")[0]: row.split(" | ")[1] for row in found["Main effects at equal generated tokens"][2:]
    }
    assert_in_text(f"it gains {without_errors(tokens['overlong filtering'])[1:].replace(' (', ' points (')}")
    rates = endpoints(read_search("lr"))["equal updates"]
    higher, token = (
        [100 * (rates[f"{row}_2.5e-4", n] - rates[f"{above}_2.5e-4", n]) for n in (100, 101)] for above, row in RARE
    )
    assert_in_text("loses {:.1f} and {:.1f} points", *(-step for step in higher))
    assert_in_text("gains {:.1f} and {:.1f}. Two seeds", *token)


def test_accuracy_and_entropy() -> None:
    runs, shares, ends = by_variant(load_results(FILES["ladder"])), [], []
    for variant in ("grpo", "dapo"):
        entropy, accuracy = entropy_points(runs[variant])
        law, line = linregress(np.exp(entropy), accuracy), linregress(entropy, accuracy)
        shares.append((100 * law.rvalue**2, 100 * line.rvalue**2))
        ends.append(100 * (law.intercept + law.slope))
    assert_in_text("{:.0f} % of the variance for naive GRPO and {:.0f} % for DAPO", *(law for law, _ in shares))
    assert_in_text("a straight line {:.0f} and {:.0f} %", *(line for _, line in shares))
    assert_in_text("it expects {:.1f} and {:.1f} %", *ends)


def test_the_other_tasks() -> None:
    """The task without entropy, and the small language model."""
    clipped = [100 * mean(run["curves"]["train/clip_high"][1]) for run in read(TABLE1)]
    assert_in_text("{:.2f} to {:.2f} % of the tokens meet the upper clip bound", min(clipped), max(clipped))
    rows = [by_row(TABLE1, budget) for budget in BUDGETS]
    tests = [paired_test(of[row], of[above]) for of in rows for above, row in pairwise(LADDER)]
    updates, tokens = (show(test) for test in tests[4::5])
    assert_in_text(f"changed accuracy by {updates} points at equal updates and by {tokens} at equal tokens")
    assert_in_text("Holm p {:.4f}", holm([test.p or 0.0 for test in tests])[-1])

    values = {key: by_row(SMOLLM2, key) for key in (*BUDGETS, "tokens", "cut_last")}
    shown = [estimate(values[key][name]) for key, name in (("after", "grpo"), ("after", "dapo"), (BUDGETS[1], "dapo"))]
    grpo, dapo, equal = (f"{100 * one.mean:.1f} ± {100 * one.error:.1f}" for one in shown)
    assert_in_text(f"naive GRPO solves {grpo} % and DAPO {dapo} %")
    assert_in_text(f"it solved {equal} %")
    tokens, cut = ({name: mean(of) for name, of in values[key].items()} for key in ("tokens", "cut_last"))
    assert_in_text("generated {:.1f} times as many tokens", tokens["dapo"] / tokens["grpo"])
    assert_in_text(
        "{:.0f} % of its last responses are truncated, and {:.0f} % of", 100 * cut["grpo"], 100 * cut["dapo"]
    )


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
    curves = [run["curves"][curve][1] for run in read(RESULTS / f"study-{study}-20261125.json")]
    assert len(curves) == 5
    ends = (scale * mean(values[place] for values in curves) + offset for place in (0, -1))
    assert_in_text(figures, *ends, page=(ROOT / "docs" / "environments.md").read_text(encoding="utf-8"))


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
