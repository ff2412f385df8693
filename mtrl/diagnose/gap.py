"""Gap between training rows and held-out rows: the policy learns the former but not the latter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mtrl.diagnose.record import Record, Series
from mtrl.diagnose.stats import Change, compare, error_of_share, noise
from mtrl.diagnose.views import HELD_OUT, REWARD, SAMPLED, SUCCESS, level

RISE = 0.15
"""Minimum gain of training success, and its minimum lead over the evaluation, as shares of the rollouts."""
FOLLOWS = 0.5
"""Share of the gain of training. Held-out success has not followed training if it certainly gained less than this
share."""
FALL = 0.1
"""Minimum loss of held-out success since the best evaluation, as a share of the held-out episodes."""


@dataclass(frozen=True)
class Gap:
    """Training improved and the evaluations did not, or the evaluations became worse and training did not."""

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
    """Whether held-out success is certainly lower than at its best, while training did not lose as much."""


def find_gap(record: Record) -> Gap | None:
    """Return the gap if training is certainly ahead of the last evaluation, and the evaluations either did not follow
    training or fell from their best while training did not; else None."""
    scored = record.has(SUCCESS)
    train, held = record.series(SUCCESS if scored else REWARD), record.series(HELD_OUT)
    if len(held) < 2 or len(train) < record.window:
        return None
    values = train.values / (1.0 if scored else record.unit)
    curves = _Curves(Series(train.steps, values), held, record.series(SAMPLED).values, record.window, _episodes(record))
    trained = curves.trained(len(held) - 1)
    if trained is None or not curves.is_ahead(trained, 2.0):
        return None
    falls = curves.fell()
    if not falls and not curves.is_left_behind():
        return None
    top = int(np.argmax(held.values))
    return Gap(trained, scored, float(held.values[-1]), float(held.values[top]), int(held.steps[top]), falls)


@dataclass(frozen=True)
class _Curves:
    train: Series
    """Success of the rollouts, or their reward in units of a success."""
    held: Series
    sampled: np.ndarray
    """Success of the evaluations at the sampling temperature, which training rollouts have too; greedy success may
    follow in jumps."""
    window: int
    episodes: float
    """Number of episodes of one evaluation."""

    def trained(self, index: int) -> Change | None:
        """Return the change of training from its first to its last window up to evaluation `index`; None if there are
        too few steps. In a short run a window is a quarter of the steps, because halves would hide the gain."""
        seen = self.train.until(int(self.held.steps[index])).values
        width = min(self.window, max(len(seen) // 4, 3))
        return compare(seen[:width], seen[-width:], noise(self.train.values)) if len(seen) >= 2 * width else None

    def is_ahead(self, trained: Change, errors: float) -> bool:
        last = float(self.held.values[-1])
        return trained.after - last - errors * error_of_share(last, self.episodes) >= RISE

    def is_left_behind(self) -> bool:
        """Whether the last evaluation did not follow training, with a margin of two standard errors. This needs a
        confirmation: by the sampled evaluations if they exist; else by a margin of four standard errors, or by the
        evaluation before the last."""
        trained = self._not_followed(len(self.held) - 1, 2.0)
        if trained is None:
            return False
        if len(self.sampled) > 1:
            return not self._followed(self.sampled[0], self.sampled[-1], trained, 2.0)
        if self._not_followed(len(self.held) - 1, 4.0) is not None and self.is_ahead(trained, 4.0):
            return True
        return len(self.held) > 2 and self._not_followed(len(self.held) - 2, 2.0) is not None

    def fell(self) -> bool:
        """Whether the last evaluation is certainly lower than the best, the one before it by two thirds of the required
        difference, and training did not lose as much since the best. The mean of greedy and sampled success is compared
        if both exist.

        The best of many evaluations is high by chance, so the required number of standard errors grows with the number
        of evaluations; it is larger by one if only one evaluation follows the best.
        """
        rates, episodes = self.held.values, self.episodes
        if len(self.sampled) == len(rates) and (self.sampled != rates).any():
            # Both kinds use the same rows and are correlated, so they count as 1.5 times the episodes, not twice.
            rates, episodes = (rates + self.sampled) / 2, 1.5 * episodes
        top = int(np.argmax(rates))
        best, after = float(rates[top]), rates[top + 1 :]
        if not len(after):
            return False
        errors = max(3.2, 1.2 + math.sqrt(2.0 * math.log(len(rates)))) + (len(after) < 2)
        for rate, share in zip(after[:-3:-1].tolist(), (1.0, 2 / 3), strict=False):
            if best - rate < share * max(FALL, errors * _error(best, rate, episodes)):
                return False
        return self._kept(top, best - float(after[-1]))

    def _kept(self, top: int, fall: float) -> bool:
        """Whether training, since evaluation `top`, certainly lost less than the share `FOLLOWS` of `fall`, which the
        evaluations lost."""
        values = self.train.values
        width = min(self.window, max(len(values) // 4, 3))
        then = self.train.until(int(self.held.steps[top])).values[-width:]
        change = compare(then if len(then) >= 3 else values[:width], values[-width:], noise(values))
        return -change.difference + 2.0 * change.error < FOLLOWS * fall

    def _not_followed(self, index: int, errors: float) -> Change | None:
        """Return the gain of training up to evaluation `index` if that evaluation did not follow it; else None."""
        trained = self.trained(index)
        if trained is None or trained.at_least(2.0) < RISE:
            return None
        first, then = float(self.held.values[0]), float(self.held.values[index])
        return None if self._followed(first, then, trained, errors) else trained

    def _followed(self, first: float, last: float, trained: Change, errors: float) -> bool:
        """Whether evaluations may have gained the share `FOLLOWS` of the gain of training, within `errors` standard
        errors."""
        return last - first + errors * _error(first, last, self.episodes) >= FOLLOWS * trained.difference


def _episodes(record: Record) -> float:
    return max(1.0, level(record, "val/episodes") or float(record.setting("evaluation.rows")))


def _error(first: float, last: float, episodes: float) -> float:
    """Return the standard error of the difference of two evaluations."""
    return math.hypot(error_of_share(first, episodes), error_of_share(last, episodes))
