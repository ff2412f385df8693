"""Weights of the sources of a mixture: constant, or a schedule over the training rows that a run has drawn."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mtrl.config import keys
from mtrl.errors import UserError


@dataclass(frozen=True)
class Weight:
    """Weight of a source as a function of the number of training rows that the run has drawn: linear between points,
    constant before the first point and after the last one."""

    points: tuple[tuple[int, float], ...]
    """Numbers of rows, increasing, with the weight at each; one point is a constant weight."""

    def at(self, rows: int) -> float:
        """Return the weight of the next row, after `rows` rows."""
        place = bisect_right(self.points, rows, key=lambda point: point[0])
        if place in (0, len(self.points)):
            return self.points[max(0, place - 1)][1]
        (before, low), (after, high) = self.points[place - 1 : place + 1]
        return low + (high - low) * (rows - before) / (after - before)

    @property
    def is_ever_positive(self) -> bool:
        return any(weight for _, weight in self.points)


def read_weight(name: str, value: Any) -> Weight:
    """Return the weight of the source `name`: a number, or a schedule as a list of pairs of a number of training rows
    and a weight.

    Raises:
        UserError: the value is neither.
    """
    if _is_weight(value):
        return Weight(((0, float(value)),))
    place = f"environments.{name}.weight={keys.typed(value)}"
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{place} must be a number of at least 0, or a schedule; write 1.0, or [[0,3],[1600,1]]")
    pairs = [list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else [] for pair in value]
    counts = [pair[0] for pair in pairs if len(pair) == 2 and _is_weight(pair[1]) and type(pair[0]) is int]
    if not pairs or len(counts) < len(pairs) or counts[0] < 0 or any(a >= b for a, b in pairwise(counts)):
        raise UserError(
            f"{place} is no schedule: it must be a list of pairs, each an increasing number of training rows and the "
            "weight after these rows; write [[0,3],[1600,1]]"
        )
    return Weight(tuple((rows, float(weight)) for rows, weight in pairs))


def shares_of(weights: Mapping[str, Weight], rows: int) -> dict[str, float]:
    """Return the share of each source in the next row, after `rows` rows; equal shares if all weights are 0."""
    found = {name: weight.at(rows) for name, weight in weights.items()}
    total = sum(found.values())
    return {name: weight / total if total else 1 / len(found) for name, weight in found.items()}


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0
