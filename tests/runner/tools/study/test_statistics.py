"""Means, errors and tests over seeds against tables; the fit R = −a·exp(H) + b to the logs of runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import write_rows
from test_study import finish, planned

from dapo_runner.tools.study.figures import align, differences, entropy_points
from dapo_runner.tools.study.page import write_page
from dapo_runner.tools.study.results import Estimate, estimate, holm, paired_test, read_result

A, B = 0.2, 0.9


def test_holm_and_means_by_hand() -> None:
    """Step down: 4 × 0.01, 3 × 0.02; 2 × 0.022 would be less than the one before; at most 1."""
    assert holm([0.022, 0.01, 0.9, 0.02]) == pytest.approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.7, 0.6]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []
    assert [estimate(values) for values in ([], [0.5])] == [None, Estimate(0.5, None)]
    assert estimate([0.0, 1.0]) == Estimate(0.5, pytest.approx(0.5))


def test_a_paired_test_goes_by_differences() -> None:
    """Seeds that are far apart, and a small gain on each: unpaired, that would be nothing."""
    test, no_spread = paired_test([0.12, 0.51, 0.93], [0.10, 0.50, 0.90]), paired_test([0.3, 0.6], [0.1, 0.4])
    assert test is not None
    assert no_spread is not None
    assert test.difference.mean == pytest.approx(0.02)
    assert test.p == pytest.approx(0.0742, abs=5e-5)  # t = 2√3 with two degrees of freedom
    assert no_spread.difference.error != 0.0  # a spread of rounding, which is none
    assert no_spread.p is no_spread.interval is paired_test([], []) is None


def test_lines_are_of_the_places_and_differences_of_the_seeds_that_both_have() -> None:
    lines = align([([0.0, 10.0], [0.0, 1.0]), ([0.0, 5.0, 20.0], [1.0, 1.0, 1.0])])
    assert lines is not None
    places, values = lines
    assert (places[0], places[-1]) == (0.0, 10.0)
    np.testing.assert_allclose(values, [places / 10, np.ones_like(places)])
    runs = {3: ([0.0, 5.0], [0.5, 0.75]), 4: ([0.0, 5.0], [9.0, 9.0]), 5: ([0.0, 5.0], [0.0, 1.0])}
    others = {5: ([0.0, 5.0], [0.25, 0.5]), 3: ([0.0, 5.0], [0.5, 0.25]), 7: ([0.0, 5.0], [8.0, 8.0])}
    lines = differences(runs, others)
    assert lines is not None
    assert [part.tolist() for part in lines] == [[0.0, 5.0], [[0.0, 0.5], [-0.25, 0.5]]]
    assert align([([], [])]) is differences(runs, {5: ([], [])}) is None


def test_a_page_has_the_fit_of_every_evaluation_but_the_first(tmp_path: Path) -> None:
    study, runs = planned(tmp_path, entropy_fit=["plain"], overrides={"run": {"steps": 6, "eval_every": 2}})
    plain = [run for run in runs if run.variant == "plain"]
    for run in plain:
        finish(run, [0.2, 0.3, 0.5])
        metric = f"eval/avg@{run.config.evaluation.k}"
        lines: list[dict[str, Any]] = [{"step": 0, "kind": "eval", metric: 0.0}]
        for step in range(1, 7):
            entropy = step / 6 + run.seed / 100
            lines.append({"step": step, "kind": "step", "sampling/tokens": 9, "train/entropy": entropy})
            if step % 2 == 0:
                lines.append({"step": step, "kind": "eval", metric: B - A * math.exp(entropy)})
        write_rows(run.folder / "metrics.jsonl", lines)
    results = [read_result(run) for run in plain]
    assert [len(points) for points in entropy_points(results)] == [6, 6]
    page = write_page(study, results, []).read_text()
    assert "| plain | 0.200 | 0.900 | 0.700 | 1.000 | 6 |" in page
    assert (study.folder / "entropy_fit.png").stat().st_size > 5000
