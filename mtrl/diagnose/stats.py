"""How sure a curve says something: pure functions over the values of a metric, in the order of their steps.

Steps of a run are not independent draws: the same policy acts in neighbouring ones, so the error of a mean over them is
widened by the autocorrelation that is left (Bartlett: by √((1 + r) / (1 - r)) for a lag-1 correlation r).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = Sequence[float] | np.ndarray
MAX_CORRELATION = 0.8
"""More than this is a trend, not noise."""


@dataclass(frozen=True)
class Mean:
    """The mean of a window and its standard error."""

    value: float
    error: float
    count: int


@dataclass(frozen=True)
class Change:
    """How much one window differs from another, `after - before`, and the standard error of that."""

    before: float
    after: float
    error: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def z(self) -> float:
        """In standard errors; infinite for a difference between windows without any noise."""
        if self.error > 0:
            return self.difference / self.error
        return math.copysign(math.inf, self.difference) if self.difference else 0.0

    def at_least(self, sure: float = 3.0) -> float:
        """The change that is certain, `sure` errors towards 0; 0 where its sign is not."""
        return math.copysign(max(0.0, abs(self.difference) - sure * self.error), self.difference)

    def at_most(self, sure: float = 2.0) -> float:
        """The largest change, of either sign, that the noise could hide."""
        return abs(self.difference) + sure * self.error


def mean(values: Values, noise: float | None = None) -> Mean:
    """The mean of `values`; `noise` is their standard deviation around their trend, where it is known better.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("no values to take the mean of")
    data = np.asarray(values, float)
    spread = wobble(data) if noise is None else noise
    return Mean(float(data.mean()), spread / math.sqrt(len(data)), len(data))


def wobble(values: Values) -> float:
    """Standard deviation around the straight line through `values`, widened by what correlation is left.

    Fewer than three values lie on their line: infinite, for nothing is known of their noise.
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
    """Standard deviation of the steps around the curve, whatever its shape.

    `wobble` pooled over parts of `width` steps, counted from the end; what is left at the beginning is left out.

    Infinite for fewer than three values.
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
    """From the mean of one window to that of another.

    Raises:
        ValueError: one of them is empty.
    """
    first, second = mean(before, noise), mean(after, noise)
    return Change(first.value, second.value, math.hypot(first.error, second.error))


def error_of_share(share: float, episodes: float) -> float:
    """The standard error of a share of so many episodes, which one more or less cannot make vanish."""
    kept = min(max(share, 1 / episodes), 1 - 1 / episodes) if episodes > 2 else 0.5
    return math.sqrt(kept * (1 - kept) / episodes)


def halves(values: Values) -> Change:
    """From the first half of `values` to the second; with an odd number the middle one is in neither."""
    half = len(values) // 2
    return compare(values[:half], values[len(values) - half :], wobble(values))


def slope(values: Values) -> Mean:
    """The rise per step of the least-squares line, and its error (as for the mean: widened by correlation)."""
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
    """Where a jump fits best: index of the first value after it, at least `least` from both ends; None for too few.

    Of all splits in two levels the one with the smallest sum of squares.
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
    """Means of all windows of `width` values: entry i is that of `values[i : i + width]`."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, float)]))
    means: np.ndarray = (sums[width:] - sums[:-width]) / width
    return means


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Values, width: int = 40) -> str:
    """The curve as one line of blocks, from its smallest value to its largest; long ones as means of `width` parts."""
    data = np.asarray([value for value in values if math.isfinite(value)], float)
    if not len(data):
        return ""
    if len(data) > width:
        data = np.array([part.mean() for part in np.array_split(data, width)])
    low, high = float(data.min()), float(data.max())
    if high == low:
        return BARS[3] * len(data)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in data)
