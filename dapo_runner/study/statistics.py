"""What several seeds say: mean, standard error, and whether one variant differs from another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

ROUNDING = 1e-12  # what a difference of two figures, both at most 1, may be off by, with a margin


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of a figure over ``n`` seeds; the standard error, s/√n, is None of a single one."""

    mean: float
    error: float | None
    n: int


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Student's paired t-test over the seeds that two variants share; ``p`` is two-sided."""

    difference: Estimate
    p: float | None  # None with fewer than two seeds, or without any spread


def estimate(values: Sequence[float]) -> Estimate | None:
    """None without a value."""
    if not values:
        return None
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error, len(values))


def paired_test(values: Sequence[float], others: Sequence[float]) -> PairedTest | None:
    """Whether ``values`` − ``others``, pair by pair, is on average zero. None without a pair."""
    difference = estimate([value - other for value, other in zip(values, others, strict=True)])
    if difference is None:
        return None
    if difference.error is None or difference.error < ROUNDING:
        return PairedTest(difference, None)
    return PairedTest(difference, two_sided_p(difference.mean / difference.error, difference.n - 1))


def two_sided_p(t: float, df: int) -> float:
    """P(|T| ≥ |t|) of Student's t with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = df % 2 == 1
    term = total = (cosine if df > 1 else 0.0) if odd else 1.0
    for k in range(3 if odd else 2, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return max(0.0, 1.0 - inside)
