"""Gap between training rows and held-out rows: the policy learns the former but not the latter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtrl.diagnose.record import Record
from mtrl.diagnose.rules.views import HELD_OUT, REWARD, SAMPLED, SUCCESS, level
from mtrl.diagnose.stats import Change, compare, error_of_share, noise

RISE = 0.15
"""Minimum gain of training success, and its minimum lead over the evaluation, as shares of the rollouts."""
FOLLOWS = 0.5
"""Share of the gain of training. Held-out success has not followed training if it certainly gained less than this
share."""


@dataclass(frozen=True)
class Gap:
    """Training improved, and the evaluations did not."""

    trained: Change
    """Success of the rollouts by the scorer, or their reward in units of a success if nothing was scored; from the
    first window to the window that ends at the last evaluation."""
    scored: bool
    """Whether `trained` is success by the scorer, not reward."""
    held_out: float
    """Held-out success at the last evaluation."""
    best: float
    """Held-out success of the best evaluation."""
    best_step: int
    """Step of the best evaluation."""
    falls: bool
    """Whether held-out success is certainly lower than at its best."""


def find_gap(record: Record) -> Gap | None:
    """Return the gap if, with a margin of two standard errors, the last two evaluations did not follow and training
    leads the last one; else None."""
    scored = record.has(SUCCESS)
    train = record.series(SUCCESS if scored else REWARD)
    held = record.series(HELD_OUT)
    if len(held) < 3 or len(train) < record.window:
        return None
    values, episodes = train.values / (1.0 if scored else record.unit), _episodes(record)
    usual, gaps = noise(values), []
    for step, rate in list(zip(held.steps, held.values, strict=True))[-2:]:
        last = values[train.steps <= step][-record.window :]
        if len(last) < 3:
            return None
        trained = compare(values[: len(last)], last, usual)
        if trained.at_least(2.0) < RISE or _followed(held.values[0], rate, trained, episodes):
            return None
        gaps.append(trained)
    if gaps[-1].after - held.values[-1] - 2 * error_of_share(held.values[-1], episodes) < RISE:
        return None
    sampled = record.series(SAMPLED).values  # sampled like training rollouts; greedy success may follow in jumps
    if len(sampled) > 1 and _followed(sampled[0], sampled[-1], gaps[-1], episodes):
        return None
    top = int(np.argmax(held.values))
    best, now = float(held.values[top]), float(held.values[-1])
    error = math.hypot(error_of_share(best, episodes), error_of_share(now, episodes))
    return Gap(gaps[-1], scored, now, best, int(held.steps[top]), falls=best - now > 3 * error)


def _followed(first: float, last: float, trained: Change, episodes: float) -> bool:
    """Whether evaluations may have gained the share `FOLLOWS` of the gain of training, within two standard errors."""
    error = math.hypot(error_of_share(first, episodes), error_of_share(last, episodes))
    return last - first + 2 * error >= FOLLOWS * trained.difference


def _episodes(record: Record) -> float:
    return max(1.0, level(record, "val/episodes") or float(record.setting("evaluation.rows")))
