"""A fall of the reward: when it began, and how much is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtrl.diagnose.record import Record
from mtrl.diagnose.rules.views import REWARD
from mtrl.diagnose.stats import change_point, noise, running_mean

HEIGHT = 0.08
"""Of the reward of a success: what never was higher cannot collapse."""
GONE, HALF = 0.35, 0.55
"""Share of its height that is left: a collapse, and the beginning of one."""
SURE = 5.0
"""Standard errors."""
LAST = 3
"""Steps that all have to be low."""
FIRST, REST = 4, 8
"""Steps at most that a fall at the start leaves before it, and that have to follow."""


@dataclass(frozen=True)
class Drop:
    """The fall that the last steps are in."""

    step: int
    """The first step below."""
    peak: float
    """The best mean of some steps before."""
    now: float
    """The mean of the last steps."""
    left: float
    """What is left, as a share of the height over the floor."""
    at_start: bool = False
    """The first updates made it."""


def find_drop(record: Record) -> Drop | None:
    """The fall, if there is one; its floor is 0, or the lowest reward where rewards are negative."""
    return _later(record) or _at_start(record)


def _at_start(record: Record) -> Drop | None:
    """After one to `FIRST` steps, of which no mean of five can be taken; nothing has come back since."""
    reward = record.series(REWARD)
    values = reward.values
    for width in range(1, FIRST + 1):
        first, rest = values[:width], values[width:]
        if len(rest) < REST:
            return None
        floor, peak, now = min(0.0, float(values.min())), float(first.mean()), float(rest.mean())
        height = peak - floor
        if height < HEIGHT * record.unit or rest.max() > floor + GONE * height:
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
    """How much the mean reward of a step varies by the luck of its prompts, each of which is solved or is not; the
    standard deviation, where a success earns `record.unit`."""
    share = min(max(peak / record.unit, 0.0), 1.0)
    prompts = max(1, int(record.setting("trainer.prompts_per_step")))
    return record.unit * math.sqrt(share * (1 - share) / prompts) / 2
