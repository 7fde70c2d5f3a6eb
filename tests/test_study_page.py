"""The tables of docs/study.md are those of the values per run."""

from __future__ import annotations

import json
import math
from itertools import dropwhile, takewhile
from statistics import mean, stdev
from typing import Any

import pytest

pytest.importorskip("matplotlib")
stats = pytest.importorskip("scipy.stats")

from docs.study_pictures import BUDGETS, LADDER, ROOT, VALUES, differences  # noqa: E402

PAGE = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
PROMPT_MEANS = ROOT / "benchmarks" / "results" / "study-prompt-mean-20261124.json"
RUNS = json.loads(VALUES.read_text(encoding="utf-8"))
ACCURACY = {budget: {(run["variant"], run["seed"]): run[budget] for run in RUNS} for budget in BUDGETS}


def error(points: list[float]) -> float:
    return stdev(points) / len(points) ** 0.5


def compared(points: list[float]) -> tuple[str, float]:
    """What the page says of a row against the row above, and the p-value of a paired t-test."""
    reach = stats.t.ppf(0.975, len(points) - 1) * error(points)
    figures = f"{mean(points):+.1f} ± {error(points):.1f} ({mean(points) - reach:+.1f} to {mean(points) + reach:+.1f})"
    return figures.replace("-", "−"), float(stats.ttest_1samp(points, 0.0).pvalue)


def holm(p_values: list[float]) -> list[float]:
    """Return the p-values corrected for their number (Holm 1979), in their order."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def test_accuracy_of_every_row() -> None:
    for row, label in LADDER.items():
        cells = []
        for values in ACCURACY.values():
            points = [100 * value for (variant, _), value in values.items() if variant == row]
            cells.append(f"{mean(points):.1f} ± {error(points):.1f}")
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {label} | ") and "±" in line)
        assert [cell.strip() for cell in line.split("|")[3:5]] == cells, label


def test_every_difference_with_its_interval_and_p_values() -> None:
    found = {
        budget: {row: compared(points) for row, points in differences(ACCURACY[budget]).items()} for budget in BUDGETS
    }
    raw = [p for rows in found.values() for _, p in rows.values()]
    corrected = iter(holm(raw))
    lines = [line.split("|") for line in PAGE.splitlines() if " to " in line and line.startswith("| + ")]
    assert len(lines) == len(LADDER) - 1
    for place, rows in enumerate(found.values()):
        for cells, (figures, p) in zip(lines, rows.values(), strict=True):
            assert cells[2 + 3 * place].strip() == figures
            assert float(cells[3 + 3 * place]) == pytest.approx(p, rel=0.05)
            assert float(cells[4 + 3 * place]) == pytest.approx(next(corrected), rel=0.05)


def test_prompt_means_against_token_means() -> None:
    runs = json.loads(PROMPT_MEANS.read_text(encoding="utf-8"))
    lines = [line.split("|") for line in PAGE[PAGE.index("## Eq. 8") :].splitlines() if line.startswith("| ")][1:4]
    for place, budget in enumerate(BUDGETS):
        rows = {name: [100 * run[budget] for run in runs if run["variant"] == name] for name in ("dapo", "prompt_mean")}
        gains = [one - other for one, other in zip(rows["prompt_mean"], rows["dapo"], strict=True)]
        expected = [*(f"{mean(points):.1f} ± {error(points):.1f}" for points in rows.values()), compared(gains)[0]]
        assert [line[2 + place].strip() for line in lines] == expected


def test_runs_that_were_repeated_gave_the_same_values() -> None:
    before = {(run["variant"], run["seed"]): run for run in RUNS}
    repeated = [run for run in json.loads(PROMPT_MEANS.read_text(encoding="utf-8")) if run["variant"] == "dapo"]
    assert len(repeated) == 3
    for run in repeated:
        for name in ("before", "half", "after", "tokens", "entropy_last", "length_last"):
            assert run[name] == before["dapo", run["seed"]][name]


def test_what_the_clip_bounds_meet() -> None:
    """ "0.04 % of the tokens meet the upper bound, and at most 0.2 % in any step; 0.2 to 0.3 % meet the lower"."""
    for run in json.loads(PROMPT_MEANS.read_text(encoding="utf-8")):
        upper, lower = (run["curves"][f"train/clip_{side}"][1] for side in ("high", "low"))
        assert (round(100 * mean(upper), 2), round(100 * max(upper), 1) <= 0.2) in ((0.04, True), (0.05, True))
        assert 0.2 <= round(100 * mean(lower), 1) <= 0.3


def read(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((VALUES.parent / f"study-{name}.json").read_text(encoding="utf-8"))
    return found


def by_row(runs: list[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """Return the values of each row, seed by seed."""
    rows: dict[str, list[float]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        rows.setdefault(run["variant"], []).append(run[key])
    return rows


def cells_of(heading: str) -> list[list[str]]:
    """Return the rows of the first table after a heading."""
    lines = PAGE[PAGE.index(f"## {heading}\n") :].splitlines()
    table = list(takewhile(lambda line: line.startswith("|"), dropwhile(lambda line: not line.startswith("|"), lines)))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[2:]]


TRICKS = ["whole", "group_mean", "batch_std", "batch_mean", "by_sequence", "clip", "short", "short_filter"]
TRICKS += ["long", "long_filter", "top_entropy", "clip_cov", "kl_cov", "gspo", "cispo"]


def test_the_parts_one_by_one() -> None:
    values = {key: by_row(read("tricks-20261122"), key) for key in BUDGETS}
    gains: dict[tuple[str, str], list[float]] = {}
    for key, rows in values.items():
        for row, points in rows.items():
            base = rows[row.removesuffix("_filter")] if row.endswith("_filter") else rows["whole"]
            gains[key, row] = [100 * (one - other) for one, other in zip(points, base, strict=True)]
    p_values = {pair: float(stats.ttest_1samp(points, 0.0).pvalue) for pair, points in gains.items() if any(points)}
    table = cells_of("DAPO's parts, one by one")
    assert len(table) == len(TRICKS)
    for name, (_, after, gain, p) in zip(TRICKS, table, strict=True):
        variants = ["clip_020", "clip_024", "clip_032"] if name == "clip" else [name]
        accuracy = [[100 * value for value in values["after"][row]] for row in variants]
        errors = [f" ± {error(points):.1f}" if name != "clip" else "" for points in accuracy]
        assert after == ", ".join(f"{mean(points):.1f}{end}" for points, end in zip(accuracy, errors, strict=True))
        if name != "whole":
            compared_to = [gains["after", row] for row in variants]
            shown = ", ".join(f"{mean(one):+.1f} ± {error(one):.1f}" for one in compared_to).replace("-", "−")
            assert gain.removesuffix(" to the row above") == shown
            assert [float(one) for one in p.split(", ")] == pytest.approx(
                [p_values["after", r] for r in variants], rel=0.05
            )
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    assert len(corrected) == 32
    assert [pair for pair, value in corrected.items() if value < 0.05] == [("at_equal_tokens", "batch_mean")]
    assert corrected["at_equal_tokens", "batch_mean"] == pytest.approx(0.045, abs=0.0005)
    assert compared(gains["at_equal_tokens", "batch_mean"])[0].startswith("−2.1 ± 0.1 ")
    assert compared(gains["after", "kl_cov"])[0] == "+1.4 ± 0.6 (−1.0 to +3.8)"


def test_the_law_of_entropy_and_accuracy() -> None:
    points = []
    for run in json.loads(PROMPT_MEANS.read_text(encoding="utf-8")):
        if run["variant"] == "dapo":
            entropy = dict(zip(*run["curves"]["train/entropy"], strict=True))
            evaluations = zip(*run["curves"]["eval/avg@4"], strict=True)
            points += [(entropy[step], value) for step, value in evaluations if step in entropy]
    entropies, accuracies = zip(*points, strict=True)
    fit = stats.linregress([math.exp(value) for value in entropies], accuracies)
    law = (fit.rvalue**2, fit.intercept + fit.slope, min(entropies), max(entropies))
    assert [round(value, 2) for value in law] == [0.94, 0.94, 0.01, 0.11]
    assert "R² 0.94 and predicts 94 %" in PAGE


def test_the_small_language_model() -> None:
    runs, table = read("smollm2-20261122"), cells_of("A small language model")
    for name, cells in zip(("grpo", "dapo"), table, strict=True):
        found = {key: by_row(runs, key)[name] for key in runs[0] if key != "variant"}
        accuracy = [[100 * value for value in found[key]] for key in BUDGETS]
        assert cells[1:] == [
            *(f"{mean(points):.1f} ± {error(points):.1f}" for points in accuracy),
            f"{mean(found['tokens']) / 1000:.0f} thousand",
            f"{mean(found['seconds']):.0f}",
            f"{mean(found['entropy_first']):.1f} → {mean(found['entropy_last']):.1f}",
            f"{100 * mean(found['cut_last']):.0f} %",
        ]
    rows = by_row(runs, "after")
    gains = [one - other for one, other in zip(rows["dapo"], rows["grpo"], strict=True)]
    assert (round(100 * mean(gains)), round(stats.ttest_1samp(gains, 0.0).pvalue, 2)) == (4, 0.24)
    assert {round(100 * value) for value in by_row(runs, "before")["grpo"]} == {3}
    assert [round(100 * value) for value in by_row(runs, "half")["dapo"]] == [5, 6]
    assert round(100 * mean(by_row(runs, "cut_first")["dapo"]), -1) == 50
    tokens = by_row(runs, "tokens")
    assert round(mean(tokens["dapo"]) / mean(tokens["grpo"]), 1) == 3.4


def test_what_each_technique_did() -> None:
    """Figures of the text beside the tables."""
    values = {key: by_row(RUNS, key) for key in RUNS[0] if key != "variant"}
    for budget, shown in (("after", "+9.3 ± 2.7 (+1.7 to +16.9)"), ("at_equal_tokens", "−0.3 ± 2.2 (−6.4 to +5.8)")):
        rows = values[budget]
        gains = [100 * (one - other) for one, other in zip(rows["dapo"], rows["grpo"], strict=True)]
        assert compared(gains)[0] == shown
    assert [
        round(100 * value, 1) for value in sorted(values["before"]["dapo"])[:: len(values["before"]["dapo"]) - 1]
    ] == [9.9, 21.8]
    assert round(100 * mean(values["before"]["grpo"]), 1) == 14.4
    assert [round(100 * mean(values["cut_first"][row])) for row in ("soft", "higher")] == [9, 18]
    assert {round(mean(values["length_first"][row])) for row in ("soft", "token")} == {44}
    assert {round(mean(values["length_last"][row])) for row in ("soft", "token")} == {37}
    assert [round(mean(values["tokens"][row]) / 1e6, 1) for row in ("dapo", "token")] == [4.1, 1.9]
    steps = {budget: differences(ACCURACY[budget]) for budget in BUDGETS}
    assert (min(steps["after"]["dapo"]), max(steps["after"]["dapo"])) == pytest.approx((4.5, 14.5), abs=0.06)
    assert (min(steps["after"]["filter"]), max(steps["after"]["filter"])) == pytest.approx((-3.8, -0.9), abs=0.06)
    assert max(steps["at_equal_tokens"]["dapo"]) < 0
    for budget, p in (("after", 0.059), ("at_equal_tokens", 0.045)):
        assert holm([compared(points)[1] for points in steps[budget].values()])[-1] == pytest.approx(p, abs=0.0006)


def test_the_learning_rate() -> None:
    found = {row: round(100 * mean(points), 1) for row, points in by_row(read("search-20261122"), "after").items()}
    assert [found[row] for row in ("b", "a", "fast")] == [63.9, 60.1, 23.2]
    assert [found[row] for row in ("full_slow", "full", "full_fast")] == [80.8, 79.1, 51.2]


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
