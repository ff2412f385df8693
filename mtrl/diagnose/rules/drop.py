"""Detection of a fall of the reward: its first step, and the share of the reward that is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtrl.diagnose.record import Record
from mtrl.diagnose.stats import change_point, noise, running_mean
from mtrl.diagnose.views import REWARD

HEIGHT = 0.08
"""Minimum peak above the floor, as a share of the reward of a success. A lower reward cannot collapse."""
COLLAPSED, HALF = 0.35, 0.55
"""Largest shares of the height that are left after a collapse, and after the beginning of one."""
SURE = 5.0
"""Minimum size of a fall, in standard errors."""
LAST = 3
"""Number of last steps that all have to be low."""
FIRST, REST = 4, 8
"""Maximum number of steps before a fall at the start, and minimum number of steps after it."""


@dataclass(frozen=True)
class Drop:
    """A fall of the reward that lasts until the last step."""

    step: int
    """First step of the fall."""
    peak: float
    """Highest mean reward of a few consecutive steps before the fall."""
    now: float
    """Mean reward of the last steps."""
    left: float
    """Share of the height above the floor that is left."""
    at_start: bool = False
    """Whether the first updates caused the fall."""


def find_drop(record: Record) -> Drop | None:
    """Return the fall, if there is one. The floor is 0, or the lowest reward if rewards are negative."""
    return _later(record) or _at_start(record)


def _at_start(record: Record) -> Drop | None:
    """Return a fall after the first 1 to `FIRST` steps, which are too few for a mean of five, without a recovery
    since."""
    reward = record.series(REWARD)
    values = reward.values
    for width in range(1, FIRST + 1):
        first, rest = values[:width], values[width:]
        if len(rest) < REST:
            return None
        floor, peak, now = min(0.0, float(values.min())), float(first.mean()), float(rest.mean())
        height = peak - floor
        if height < HEIGHT * record.unit or rest.max() > floor + COLLAPSED * height:
            continue
        if peak - now > SURE * _chance(record, peak) * math.sqrt(1 / width + 1 / len(rest)):
            return Drop(int(reward.steps[width]), peak, now, (now - floor) / height, at_start=True)
    return None


def _later(record: Record) -> Drop | None:
    reward = record.series(REWARD)
    values, width = reward.values, 5 if len(reward) >= 15 else 3
    if len(values) < 2 * LAST + width:
        return None
    means = running_mean(values[:-LAST], width)
    top = int(np.argmax(means))
    floor, peak, now = min(0.0, float(values.min())), float(means[top]), float(values[-LAST:].mean())
    height = peak - floor
    if height < HEIGHT * record.unit or values[-LAST:].max() > floor + (HALF + 0.1) * height:
        return None
    left = (now - floor) / height
    spread = max(noise(values[: top + width]) if top + width >= 8 else 0.0, _chance(record, peak))
    if left > HALF or peak - now <= SURE * spread * math.sqrt(1 / width + 1 / LAST):
        return None
    since = change_point(values[top:], 2) or 0
    return Drop(int(reward.steps[top + since]), peak, now, left, at_start=top + since <= FIRST)


def _chance(record: Record, peak: float) -> float:
    """Return the standard deviation of the mean reward of a step that is due to the choice of its prompts, if each
    prompt is solved or not and a success earns `record.unit`."""
    share = min(max(peak / record.unit, 0.0), 1.0)
    prompts = max(1, int(record.setting("trainer.prompts_per_step")))
    return record.unit * math.sqrt(share * (1 - share) / prompts) / 2
