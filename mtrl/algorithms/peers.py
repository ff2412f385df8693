"""Peers: values that are compared with each other, in flat arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Values whose spread is at most this share of the largest magnitude are equal: the rest is rounding of their sums."""


@dataclass(frozen=True)
class Peers:
    """N values in sets; the values of a set stand side by side."""

    ids: NDArray[np.int64]
    """[N] the set of each value: any number, the same for a set's values and another one for its neighbours'."""
    magnitudes: Floats | None = None
    """[N] what each value was summed from, added up without signs: 0.1 + 0.2 - 0.3 is 0 but for the rounding of a sum
    of magnitude 0.6. None: the values are no sums, and their own size is their magnitude."""

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each set begins."""
        return np.flatnonzero(np.r_[True, self.ids[1:] != self.ids[:-1]][: len(self.ids)])

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Values in each set."""
        return np.diff(np.r_[self.starts, len(self.ids)])

    def spread(self, per_set: NDArray) -> NDArray:
        """From one value per set to one per member, [N]."""
        return np.repeat(per_set, self.sizes)

    def sum(self, values: Floats) -> Floats:
        """[N] the sum of each value's set."""
        return self.spread(np.add.reduceat(values, self.starts)) if len(values) else values

    def mean(self, values: Floats) -> Floats:
        """[N] the mean of each value's set."""
        return self.sum(values) / self.spread(self.sizes)

    def centre(self, values: Floats) -> Floats:
        """[N] values minus the mean of their set; exactly 0 where all of a set are equal, which the mean's rounding
        alone would not give."""
        return np.where(self.are_equal(values), 0.0, values - self.mean(values))

    def rounding(self, values: Floats) -> Floats:
        """[N] how large a difference within each value's set can be and still be rounding."""
        magnitudes = abs(values) if self.magnitudes is None else self.magnitudes
        return ROUNDING * self.spread(np.maximum.reduceat(magnitudes, self.starts)) if len(values) else values

    def are_equal(self, values: Floats) -> NDArray[np.bool_]:
        """[N] whether all values of the set are the same, up to `rounding`."""
        if not len(values):
            return np.zeros(0, dtype=bool)
        spread = np.maximum.reduceat(values, self.starts) - np.minimum.reduceat(values, self.starts)
        return self.spread(spread) <= self.rounding(values)

    def std(self, values: Floats) -> Floats:
        """[N] the unbiased standard deviation of each value's set; 0 for a set of one."""
        degrees = np.maximum(self.spread(self.sizes) - 1, 1)
        return np.sqrt(self.sum(np.square(self.centre(values))) / degrees)

    def leave_one_out(self, values: Floats) -> Floats:
        """[N] each value minus the mean of the others, n/(n-1) times the centred value; a lone value gives 0."""
        sizes = self.spread(self.sizes)
        return sizes / np.maximum(sizes - 1, 1) * self.centre(values)

    def standardise(self, values: Floats, epsilon: float) -> Floats:
        """[N] (value - mean) / (std + epsilon)."""
        return self.centre(values) / (self.std(values) + epsilon)
