"""Test for a difference between two groups of seeds: Student's t test paired by seed where possible, else Welch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

ROUNDING = 1e-9
"""Spread, and difference of means, that rounding alone can cause: success rates of a few hundred rows are often equal,
as where all seeds solve every row."""


@dataclass(frozen=True)
class RunComparison:
    difference: float
    """Mean of the second minus mean of the first."""
    p_value: float | None
    """Two-sided p-value of the hypothesis that there is no difference; None if there are too few seeds, or if different
    means have no spread, from which the test cannot be made."""
    method: str
    """paired | Welch"""


def compare_seeds(first: Mapping[object, float], second: Mapping[object, float]) -> RunComparison:
    """Compare two groups given as seed -> value. If both groups have the same seeds, the test is paired. A group of a
    single seed gives no p-value.

    Raises:
        ValueError: A group is empty.
    """
    if not first or not second:
        raise ValueError("a group without values cannot be compared")
    difference = fmean(second.values()) - fmean(first.values())
    if first.keys() == second.keys():
        return RunComparison(difference, paired([second[seed] - first[seed] for seed in first]), "paired")
    return RunComparison(difference, welch(list(first.values()), list(second.values())), "Welch")


def paired(differences: Sequence[float]) -> float | None:
    """Return the p-value of Student's test that the differences have the mean 0."""
    n = len(differences)
    return None if n < 2 else _p(fmean(differences), variance(differences) / n, n - 1)


def welch(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the p-value of Welch's test (1947) that two samples of different variances have the same mean."""
    if min(len(first), len(second)) < 2:
        return None
    errors = [variance(some) / len(some) for some in (first, second)]
    spread = sum(error**2 / (len(some) - 1) for error, some in zip(errors, (first, second), strict=True))
    return _p(fmean(second) - fmean(first), sum(errors), sum(errors) ** 2 / spread if spread else 1.0)


def _p(mean: float, squared_error: float, freedom: float) -> float | None:
    if math.sqrt(squared_error) <= ROUNDING:
        return 1.0 if abs(mean) <= ROUNDING else None
    return tail(abs(mean) / math.sqrt(squared_error), freedom)


def tail(t: float, freedom: float) -> float:
    """Return P(|T| > t) of Student's distribution. With T = sqrt(freedom) tan(a), the density of a is proportional to
    cos(a)^(freedom - 1), which is integrated numerically."""

    def area(low: float) -> float:
        angles = np.linspace(low, math.pi / 2, 4001)
        return float(np.trapezoid(np.abs(np.cos(angles)) ** (freedom - 1), angles))

    return min(1.0, area(math.atan(t / math.sqrt(freedom))) / area(0.0))
