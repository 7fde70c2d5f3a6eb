"""The tables of docs/study.md are those of the values per run."""

from __future__ import annotations

import json
from statistics import mean, stdev

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
