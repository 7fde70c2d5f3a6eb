"""The figures of docs/environments.md are those of the values per run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "environments.md").read_text(encoding="utf-8").split())


def first_and_last(study: str, curve: str) -> list[float]:
    """Return the means over five seeds of a curve's first and last values."""
    path = ROOT / "benchmarks" / "results" / f"study-{study}-20261125.json"
    curves = [run["curves"][curve][1] for run in json.loads(path.read_text(encoding="utf-8"))]
    assert len(curves) == 5
    return [mean(values[place] for values in curves) for place in (0, -1)]


@pytest.mark.parametrize(
    ("study", "curve", "scale", "offset", "words"),
    [
        ("calculator", "eval/avg@4", 100, 0, "accuracy from {0:.1f} % to {1:.1f} %"),
        ("calculator", "eval/turns", 100, -100, "call it rises from {0:.0f} % to {1:.0f} %"),
        ("guess", "eval/turns", 1, 0, "turns falls from {0:.2f} to {1:.2f}"),
    ],
)
def test_figures_of_the_page(study: str, curve: str, scale: float, offset: float, words: str) -> None:
    assert words.format(*(scale * value + offset for value in first_and_last(study, curve))) in PAGE
