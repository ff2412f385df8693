"""Certainty of success rates, and tests for differences between policies, in closed form without resampling."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Rate:
    """A measured rate and its confidence interval, all in [0, 1]."""

    value: float
    low: float
    high: float
    effective_samples: float
    """Equivalent number of independent trials."""


@dataclass(frozen=True)
class Paired:
    """Paired result of two policies on the same prompts."""

    wins: int
    """Number of prompts on which the second policy was better."""
    losses: int
    ties: int
    difference: float
    """Mean of second - first."""
    p_value: float
    """Two-sided p-value of the hypothesis that wins and losses are equally likely."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its confidence interval, all in [-1, 1]."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (Wilson 1927): (low, high) in [0, 1], valid also if no trial or
    every trial succeeds.

    Raises:
        ValueError: 0 <= successes <= trials does not hold, there are no trials, or `level` is not between 0 and 1.
    """
    if not (trials > 0 and 0 <= successes <= trials and 0 < level < 1):
        raise ValueError(f"no interval at level {level} for {successes} successes in {trials} trials")
    z = _z(level)
    rate = successes / trials
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    low = 0.0 if successes == 0 else max(centre - half, 0.0)  # at the ends the formula is exact except for rounding
    high = 1.0 if successes == trials else min(centre + half, 1.0)
    return low, high


def _z(level: float) -> float:
    """Return the number of standard deviations on either side of the mean that hold `level` of a normal distribution.

    It is computed from the lower tail, because (1 + level) / 2 rounds to 1 for levels close to 1.
    """
    return -NormalDist().inv_cdf((1 - level) / 2)


def success_rate(outcomes: Sequence[Sequence[float]], level: float = 0.95) -> Rate:
    """Return the mean over prompts of the success rate of their samples, with an interval that accounts for prompts.

    Samples of one prompt are correlated, so n samples each of P prompts are worth less than n x P independent trials
    ("Adding error bars to evals", 2411.00640). The variance is therefore taken between prompts, s^2 / P, and Wilson's
    interval is computed for the number of independent trials of that variance, p (1 - p) / (s^2 / P), which is limited
    to between P and the number of samples (Korn and Graubard 1998; Wilson's form: Franco et al. 2019, PMC6690503). With
    one sample per prompt this is the plain Wilson interval.

    Args:
        outcomes: P prompts, each with the outcomes of its samples in [0, 1].

    Raises:
        ValueError: There are no prompts, a prompt has no samples, or an outcome is outside of [0, 1].
    """
    if not all(outcomes):
        raise ValueError("every prompt needs at least one outcome")
    rates = [math.fsum(samples) / len(samples) for samples in outcomes]
    return mean_rate(rates, sum(map(len, outcomes)), level)


def mean_rate(values: Sequence[float], samples: int, level: float = 0.95) -> Rate:
    """Return the mean of one value per prompt, such as its pass@k, with an interval as in `success_rate`.

    Args:
        values: P independent values in [0, 1].
        samples: Maximum number of independent trials that the values are worth; P is the conservative choice.

    Raises:
        ValueError: There are no values, a value is outside of [0, 1], or there are fewer samples than values.
    """
    prompts = len(values)
    if not prompts or samples < prompts or not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"no interval for {prompts} values from {samples} samples; need 1 <= values <= samples, in [0, 1]"
        )
    mean = math.fsum(values) / prompts
    variance = math.fsum((value - mean) ** 2 for value in values) / max(prompts - 1, 1) / prompts
    # Without spread (all succeed, all fail, a single prompt) the variance is unknown: count only the prompts.
    effective = mean * (1 - mean) / variance if variance > 0 else prompts
    effective = min(max(effective, prompts), samples)
    low, high = wilson(mean * effective, effective, level)
    return Rate(mean, min(low, mean), max(high, mean), effective)


def mcnemar(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value of McNemar's test: the probability that `wins + losses` fair coin flips are at
    least as one-sided."""
    changed, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(changed, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**changed)


def compare(first: Sequence[float], second: Sequence[float]) -> Paired:
    """Return the sign test of two policies on the same prompts, in the same order. For successes (0 or 1) it is
    McNemar's test.

    Raises:
        ValueError: There are no prompts, or the numbers of prompts differ.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} results cannot be paired")
    differences = [b - a for a, b in zip(first, second, strict=True)]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    ties = len(differences) - wins - losses
    return Paired(wins, losses, ties, math.fsum(differences) / len(differences), mcnemar(wins, losses))


def mean_difference(differences: Sequence[float], level: float = 0.95) -> Difference:
    """Return the mean of paired differences, one per prompt, with its confidence interval.

    Two artificial prompts, one won and one lost, are added before mean and variance of the interval are computed. For
    successes (differences -1, 0, 1) this is the interval of Bonett and Price (2012, J. Educ. Behav. Stat. 37), which
    keeps its level where the plain interval fails: with few prompts, or if no prompt changed. Differences of rates
    spread less, so their interval is wider than necessary. Average the samples of one prompt first, because only
    prompts are independent.

    Raises:
        ValueError: There are no differences, one is outside of [-1, 1], or `level` is not between 0 and 1.
    """
    if not differences or not all(-1 <= d <= 1 for d in differences) or not 0 < level < 1:
        raise ValueError(f"no interval at level {level} for {len(differences)} differences; they must be in [-1, 1]")
    mean = math.fsum(differences) / len(differences)
    padded = [*differences, 1.0, -1.0]
    centre = math.fsum(padded) / len(padded)
    variance = math.fsum((d - centre) ** 2 for d in padded) / len(padded) ** 2
    half = _z(level) * math.sqrt(variance)
    return Difference(mean, min(max(centre - half, -1.0), mean), max(min(centre + half, 1.0), mean))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's step-down adjustment (Holm 1979), in the same order. If
    adjusted values below α count as findings, the probability of any false finding is at most α.

    Raises:
        ValueError: A p-value is outside of [0, 1].
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"p-values must be in [0, 1]: {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def ranking(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Return the probability that a value of `higher` is above a value of `lower`, with ties counting half: the area
    under the ROC curve (Mann and Whitney 1947). 1: all are above; 0.5: no better than chance.

    Raises:
        ValueError: `higher` or `lower` is empty.
    """
    if not higher or not lower:
        raise ValueError("a ranking needs values of both kinds")
    below = sorted(lower)
    wins = sum(bisect_left(below, value) + bisect_right(below, value) for value in higher)
    return wins / (2 * len(higher) * len(lower))
