"""Statistics over the seeds of a study: means, standard errors, paired t-tests and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import ttest_rel

ROUNDING = 1e-12  # bound on the rounding error of a difference of two values, both at most 1
LEVEL = 0.95  # of confidence intervals


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a value over ``n`` seeds and its standard error s/√n, which is None for a single seed."""

    mean: float
    error: float | None
    n: int


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Student's paired t-test over the seeds that two variants share: two-sided p and the 95 % confidence interval.

    Both are None with fewer than two seeds, or where all differences are equal.
    """

    difference: Estimate
    p: float | None = None
    interval: tuple[float, float] | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean and its standard error, None for no values."""
    if not values:
        return None
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error, len(values))


def paired_test(values: Sequence[float], others: Sequence[float]) -> PairedTest | None:
    """Test whether ``values`` − ``others``, pair by pair, is zero on average. None without a pair."""
    difference = estimate([value - other for value, other in zip(values, others, strict=True)])
    if difference is None:
        return None
    if difference.error is None or difference.error < ROUNDING:
        return PairedTest(difference)
    test = ttest_rel(values, others)
    low, high = test.confidence_interval(LEVEL)
    return PairedTest(difference, float(test.pvalue), (float(low), float(high)))


def holm(ps: Sequence[float]) -> list[float]:
    """Correct p-values for their number: bounds the chance of any false positive (Holm 1979)."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected
