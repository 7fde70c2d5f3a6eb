"""Means, errors and tests over seeds, against tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dapo_runner.study.figures import mean_and_error
from dapo_runner.study.statistics import Estimate, estimate, paired_test, two_sided_p


@pytest.mark.parametrize(
    ("t", "df", "p"),
    [
        (1.0, 1, 0.5),
        (12.706, 1, 0.05),
        (4.303, 2, 0.05),
        (3.182, 3, 0.05),
        (2.776, 4, 0.05),
        (4.604, 4, 0.01),
        (2.571, 5, 0.05),
        (2.228, 10, 0.05),
        (3.850, 29, 0.0006),
    ],
)
def test_students_t_as_tables_have_it(t: float, df: int, p: float) -> None:
    assert two_sided_p(t, df) == pytest.approx(p, rel=2e-3)
    assert two_sided_p(-t, df) == two_sided_p(t, df)


def test_of_one_seed_there_is_no_error() -> None:
    assert estimate([]) is None
    assert estimate([0.5]) == Estimate(0.5, None, 1)
    assert estimate([0.0, 1.0]) == Estimate(0.5, pytest.approx(0.5), 2)


def test_a_paired_test_goes_by_differences() -> None:
    """Seeds that are far apart, and a small gain on each: unpaired, that would be nothing."""
    test = paired_test([0.12, 0.51, 0.93], [0.10, 0.50, 0.90])
    assert test is not None
    assert test.difference.mean == pytest.approx(0.02)
    assert test.p == pytest.approx(two_sided_p(0.02 / (0.01 / math.sqrt(3)), 2))
    no_spread = paired_test([0.3, 0.6], [0.1, 0.4])
    assert no_spread is not None
    assert no_spread.difference.error != 0.0  # a spread of rounding, which is none
    assert no_spread.p is None
    assert paired_test([], []) is None


def test_a_band_over_places_that_differ() -> None:
    band = mean_and_error([([0.0, 10.0], [0.0, 1.0]), ([0.0, 5.0, 20.0], [1.0, 1.0, 1.0])])
    assert band is not None
    places, mean, error = band
    assert (places[0], places[-1]) == (0.0, 10.0)  # what both have
    np.testing.assert_allclose(mean, (places / 10 + 1) / 2)
    np.testing.assert_allclose(error, (1 - places / 10) / 2, atol=1e-12)
    same = mean_and_error([([0.0, 5.0], [0.2, 0.4])])
    assert same is not None
    assert same[2].tolist() == [0.0, 0.0]
    assert mean_and_error([([], [])]) is None
