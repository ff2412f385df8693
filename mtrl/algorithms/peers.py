"""Peers: sets of values that are compared with each other, in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Largest relative spread of values that count as equal, as a share of the largest magnitude: such a spread comes from
the rounding of their sums."""


@dataclass(frozen=True)
class Peers:
    """N values in sets; the values of a set are adjacent."""

    ids: NDArray[np.int64]
    """[N] id of each value's set: any number that is equal within a set and differs between adjacent sets."""
    magnitudes: Floats | None = None
    """[N] sum of the absolute terms that each value was summed from: 0.1 + 0.2 - 0.3 is 0 except for the rounding of a
    sum of magnitude 0.6. None: the values are not sums, and their absolute values are the magnitudes."""

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first value of each set."""
        return np.flatnonzero(np.r_[True, self.ids[1:] != self.ids[:-1]][: len(self.ids)])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of values in each set."""
        return np.diff(np.r_[self.starts, len(self.ids)])

    def spread(self, per_set: NDArray) -> NDArray:
        """Copy one value per set to each member of the set, [N]."""
        return np.repeat(per_set, self.sizes)

    def sum(self, values: Floats) -> Floats:
        """[N] the sum of each value's set."""
        return self.spread(np.add.reduceat(values, self.starts)) if len(values) else values

    def mean(self, values: Floats) -> Floats:
        """[N] the mean of each value's set."""
        return self.sum(values) / self.spread(self.sizes)

    def centre(self, values: Floats) -> Floats:
        """[N] values minus the mean of their set; exactly 0 where all values of a set are equal, where the mean's
        rounding would give a small difference."""
        return np.where(self.are_equal(values), 0.0, values - self.mean(values))

    def rounding(self, values: Floats) -> Floats:
        """[N] the largest difference within each value's set that counts as rounding."""
        magnitudes = abs(values) if self.magnitudes is None else self.magnitudes
        return ROUNDING * self.spread(np.maximum.reduceat(magnitudes, self.starts)) if len(values) else values

    def are_equal(self, values: Floats) -> NDArray[np.bool_]:
        """[N] whether all values of the set are equal, up to `rounding`."""
        if not len(values):
            return np.zeros(0, dtype=bool)
        spread = np.maximum.reduceat(values, self.starts) - np.minimum.reduceat(values, self.starts)
        return self.spread(spread) <= self.rounding(values)

    def std(self, values: Floats) -> Floats:
        """[N] the unbiased standard deviation of each value's set; 0 for a set of one."""
        degrees = np.maximum(self.spread(self.sizes) - 1, 1)
        return np.sqrt(self.sum(np.square(self.centre(values))) / degrees)

    def leave_one_out(self, values: Floats) -> Floats:
        """[N] each value minus the mean of the others in its set, which is n/(n-1) times the centred value; 0 in a set
        of one."""
        sizes = self.spread(self.sizes)
        return sizes / np.maximum(sizes - 1, 1) * self.centre(values)

    def standardise(self, values: Floats, epsilon: float) -> Floats:
        """[N] (value - mean) / (std + epsilon)."""
        return self.centre(values) / (self.std(values) + epsilon)
