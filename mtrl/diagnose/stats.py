"""Statistical certainty of curves: pure functions over the values of a metric, in the order of their steps.

Steps of a run are not independent draws, because nearly the same policy acts in neighbouring steps. The error of a mean
is therefore widened by the remaining autocorrelation (Bartlett: by √((1 + r) / (1 - r)) for a lag-1 correlation r).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
MAX_CORRELATION = 0.8
"""Upper bound of the lag-1 correlation; a larger correlation is a trend, not noise."""


@dataclass(frozen=True)
class Mean:
    """The mean of a window and its standard error."""

    value: float
    error: float
    count: int


@dataclass(frozen=True)
class Change:
    """Difference between two windows, `after - before`, and its standard error."""

    before: float
    after: float
    error: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def z(self) -> float:
        """Difference in standard errors; infinite for a difference between windows without any noise."""
        if self.error > 0:
            return self.difference / self.error
        return math.copysign(math.inf, self.difference) if self.difference else 0.0

    def at_least(self, sure: float = 3.0) -> float:
        """Return the certain part of the change: the difference reduced by `sure` standard errors towards 0; 0 if its
        sign is uncertain."""
        return math.copysign(max(0.0, abs(self.difference) - sure * self.error), self.difference)

    def at_most(self, sure: float = 2.0) -> float:
        """Return the largest change, of either sign, that the noise could hide."""
        return abs(self.difference) + sure * self.error


def mean(values: Values, noise: float | None = None) -> Mean:
    """Return the mean of `values` and its standard error. `noise` is their standard deviation around their trend, if a
    better estimate than `wobble` is known.

    Raises:
        ValueError: There are no values.
    """
    if not len(values):
        raise ValueError("no values to take the mean of")
    data = np.asarray(values, float)
    spread = wobble(data) if noise is None else noise
    return Mean(float(data.mean()), spread / math.sqrt(len(data)), len(data))


def wobble(values: Values) -> float:
    """Return the standard deviation around the straight line through `values`, widened by the remaining correlation.

    It is infinite for fewer than three values, which contain no information about the noise.
    """
    data = np.asarray(values, float)
    if len(data) < 3:
        return math.inf
    rest = data - _line(data)
    variance = float(rest @ rest) / (len(data) - 2)
    if variance <= 1e-24 * max(1.0, float(np.abs(data).max()) ** 2):
        return 0.0
    correlation = float(rest[1:] @ rest[:-1]) / float(rest @ rest)
    correlation = min(max(correlation, 0.0), MAX_CORRELATION)
    return math.sqrt(variance * (1 + correlation) / (1 - correlation))


def noise(values: Values, width: int = 10) -> float:
    """Return the standard deviation of the steps around the curve, whatever its shape.

    This is `wobble` pooled over parts of `width` steps, counted from the end; the remainder at the beginning is left
    out. It is infinite for fewer than three values.
    """
    data = np.asarray(values, float)
    parts = len(data) // width
    if parts < 2:
        return wobble(data)
    table = data[len(data) - parts * width :].reshape(parts, width)
    steps = np.arange(width) - (width - 1) / 2
    centred = table - table.mean(1, keepdims=True)
    rest = centred - np.outer(centred @ steps, steps) / (steps @ steps)
    squares = (rest**2).sum(1)
    follow = np.divide((rest[:, 1:] * rest[:, :-1]).sum(1), squares, out=np.zeros(parts), where=squares > 0)
    follow = follow.clip(0.0, MAX_CORRELATION)
    variances = squares / (width - 2) * (1 + follow) / (1 - follow)
    largest = float(np.abs(data).max())
    pooled = float(variances.mean())
    return math.sqrt(pooled) if pooled > 1e-24 * max(1.0, largest**2) else 0.0


def compare(before: Values, after: Values, noise: float | None = None) -> Change:
    """Return the change from the mean of one window to the mean of another.

    Raises:
        ValueError: A window is empty.
    """
    first, second = mean(before, noise), mean(after, noise)
    return Change(first.value, second.value, math.hypot(first.error, second.error))


def error_of_share(share: float, episodes: float) -> float:
    """Return the standard error of a share of `episodes` episodes. The share is limited to at least one episode away
    from 0 and 1, so the error is never 0."""
    bounded = min(max(share, 1 / episodes), 1 - 1 / episodes) if episodes > 2 else 0.5
    return math.sqrt(bounded * (1 - bounded) / episodes)


def halves(values: Values) -> Change:
    """Return the change from the first half of `values` to the second. With an odd number, the middle value is in
    neither."""
    half = len(values) // 2
    return compare(values[:half], values[len(values) - half :], wobble(values))


def slope(values: Values) -> Mean:
    """Return the rise per step of the least-squares line, and its standard error, widened by correlation as for the
    mean."""
    data = np.asarray(values, float)
    if len(data) < 2:
        return Mean(0.0, math.inf, len(data))
    steps = np.arange(len(data)) - (len(data) - 1) / 2
    squares = float(steps @ steps)
    return Mean(float(steps @ data) / squares, wobble(data) / math.sqrt(squares), len(data))


def _line(data: np.ndarray) -> np.ndarray:
    steps = np.arange(len(data)) - (len(data) - 1) / 2
    squares = float(steps @ steps)
    rise = float(steps @ data) / squares if squares else 0.0
    line: np.ndarray = data.mean() + rise * steps
    return line


def change_point(values: Values, least: int = 3) -> int | None:
    """Return the index of the first value after the best-fitting jump, at least `least` values from both ends; None if
    there are too few values.

    The best fit is the split into two levels with the smallest sum of squares.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 2 * least:
        return None
    sums = np.cumsum(data - data.mean())[:-1]
    sizes = np.arange(1, count)
    gain = sums**2 * (1 / sizes + 1 / (count - sizes))
    gain[: least - 1] = gain[count - least :] = -1.0
    return int(np.argmax(gain)) + 1


def running_mean(values: Values, width: int) -> np.ndarray:
    """Return the means of all windows of `width` values: entry i is the mean of `values[i : i + width]`."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    means: np.ndarray = (sums[width:] - sums[:-width]) / width
    return means


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Values, width: int = 40) -> str:
    """Return the curve as one line of blocks, scaled from its smallest value to its largest. A long curve is reduced to
    the means of `width` parts."""
    data = np.asarray([value for value in values if math.isfinite(value)], float)
    if not len(data):
        return ""
    if len(data) > width:
        data = np.array([part.mean() for part in np.array_split(data, width)])
    low, high = float(data.min()), float(data.max())
    if high == low:
        return BARS[3] * len(data)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in data)
