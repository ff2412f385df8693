"""Mean and spread of a metric over the seeds of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mtrl.figures.groups import SeedGroup
from mtrl.figures.style import half_window, moving_average


@dataclass(frozen=True)
class Band:
    """A metric over the steps at which any seed measured it. All lists have one value per step."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    """Value of the lowest seed."""
    high: list[float]
    """Value of the highest seed."""
    seeds: list[int]
    """Number of seeds whose first measurement is not after the step and whose last one is not before it."""

    @property
    def most(self) -> int:
        return max(self.seeds, default=0)

    def __bool__(self) -> bool:
        return bool(self.steps)

    def stretches(self) -> list[tuple[int, int, bool]]:
        """Return index ranges `(first, last, whole)`, ends included. Whole ranges have every seed; others lack some.

        Neighbouring ranges share their ends, so that lines drawn from them leave no gap.
        """
        found: list[tuple[int, int, bool]] = []
        for i in range(len(self.steps) - 1):
            whole = self.seeds[i] == self.seeds[i + 1] == self.most
            if found and found[-1][2] == whole:
                found[-1] = (found[-1][0], i + 1, whole)
            else:
                found.append((i, i + 1, whole))
        return found or [(0, 0, True)] * bool(self.steps)


def seed_band(group: SeedGroup, key: str, smooth: bool = False) -> Band:
    """Return mean, lowest and highest seed of a metric, aligned by step.

    Missing values and NaN are treated as in `band`. With `smooth`, each seed is first replaced by its moving average.
    """
    return band([_smooth(run.series(key)) if smooth else run.series(key) for run in group])


def band(seeds: Sequence[dict[int, float]]) -> Band:
    """Return mean, lowest and highest of several series of step -> value.

    Between two measured steps, the value of a seed is interpolated linearly, as in a plot. Before its first and after
    its last measured step, a seed does not count.
    """
    steps = sorted({step for series in seeds for step in series})
    joined = [_joined(series, steps) for series in seeds]
    values = [[series[step] for series in joined if step in series] for step in steps]
    return Band(
        steps,
        [fmean(some) for some in values],
        [min(some) for some in values],
        [max(some) for some in values],
        [len(some) for some in values],
    )


def _joined(series: dict[int, float], steps: list[int]) -> dict[int, float]:
    known = sorted(series)
    inside = [step for step in steps if known and known[0] <= step <= known[-1]]
    if not inside:
        return {}
    values = np.interp(inside, known, [series[step] for step in known])
    return dict(zip(inside, values.tolist(), strict=True))


def _smooth(series: dict[int, float]) -> dict[int, float]:
    return dict(zip(series, moving_average(list(series.values())), strict=True))


def window(group: SeedGroup, key: str) -> int:
    """Return the width of the moving average of the longest seed, in steps."""
    return 2 * half_window(max((len(run.series(key)) for run in group), default=0)) + 1


def keys_below(group: SeedGroup, prefix: str) -> list[str]:
    """Return the sorted keys with this prefix that any seed ever measured."""
    return sorted({key for run in group for row in run.rows for key in row if key.startswith(prefix)})
