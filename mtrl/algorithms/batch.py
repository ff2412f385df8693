"""The input of an advantage estimator: the rewards of a whole step as one array, and the sets of values that are
compared with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mtrl.types import Group, Trajectory, Turn

Floats = NDArray[np.float64]

ROUNDING = 1e-9
"""Largest relative spread of values that count as equal, as a share of the largest magnitude: such a spread comes from
the rounding of their sums."""

Ragged = list[list[float]]
"""One number per turn of a group: G lists of T_i floats."""

WHITEN_EPSILON = 1e-8

CHUNK = 64
"""Number of columns that `discounted_sums` computes in one matrix product."""


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


@dataclass(frozen=True)
class CreditBatch:
    """M trajectories x T turns, padded on the right; the trajectories of a group are adjacent.

    For an estimator that works per token the columns are the sampled tokens of each trajectory instead of its turns.
    """

    rewards: Floats
    """[M, T] reward of each turn; 0 in the padding."""
    mask: NDArray[np.bool_]
    """[M, T] True for a turn, False in the padding."""
    tokens: NDArray[np.int64]
    """[M, T] number of sampled tokens of each turn; 0 in the padding."""
    group: NDArray[np.int64]
    """[M] index of the group of each trajectory, ascending."""
    trajectories: Sequence[Trajectory] = ()
    """The M trajectories, for data that is not in the arrays: observations, components of the reward."""
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of `reward.components`, by name."""
    values: Floats | None = None
    """[M, T] the critic's value before each turn; 0 in the padding. None without a critic."""

    @classmethod
    def of(cls, groups: Sequence[Group], component_weights: Mapping[str, float] | None = None) -> CreditBatch:
        """Build the batch of these groups, with a column per turn. A summary of the context has no column of its own:
        its tokens count as tokens of the turn after it (`Trajectory.actions`), so that the discounts and baselines of
        turns are those of an episode whose context is not folded."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        actions = [trajectory.actions for trajectory in trajectories]
        lengths = np.array(list(map(len, actions)), dtype=np.int64)
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        columns = [turns for own in actions for turns in own]
        return cls(
            rewards=fill(mask, [math.fsum(turn.reward for turn in turns) for turns in columns]),
            mask=mask,
            tokens=fill(mask, [sum(len(turn.action_ids) for turn in turns) for turns in columns], np.int64),
            group=np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
            trajectories=trajectories,
            component_weights=component_weights or {},
        )

    @property
    def turns(self) -> list[Turn]:
        """The turns that the environment received, in the order of the True entries of the mask, row by row."""
        return [turn for trajectory in self.trajectories for turn in trajectory.environment_turns]

    @cached_property
    def outcomes(self) -> Floats:
        """[M] the reward of each trajectory, summed by `fsum`, so that it does not depend on the order of the turns."""
        return np.array([math.fsum(row) for row in self.rewards.tolist()], dtype=np.float64)

    @cached_property
    def magnitudes(self) -> Floats:
        """[M] the sum of the absolute rewards of each trajectory, which bounds the rounding error of its sums."""
        return abs(self.rewards).sum(axis=1)

    @cached_property
    def groups(self) -> Peers:
        """Sets of the M outcomes that are compared with each other: the groups."""
        return Peers(self.group, self.magnitudes)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[M] number of sampled tokens of each trajectory."""
        return self.tokens.sum(axis=1)

    def broadcast(self, per_trajectory: Floats) -> Floats:
        """Copy one value per trajectory, [M], to all of its turns, [M, T]; 0 in the padding."""
        return np.where(self.mask, per_trajectory[:, None], 0.0)

    def ragged(self, advantages: Floats) -> list[Ragged]:
        """Convert [M, T] to nested lists without padding: a list per group, of a list per trajectory, of a float per
        turn. A summary gets the advantage of its column."""
        flat = iter(advantages[self.mask].tolist())
        actions = [trajectory.actions for trajectory in self.trajectories]
        rows = [[each for turns, each in zip(own, flat, strict=False) for _ in turns] for own in actions]
        return [rows[start : start + size] for start, size in zip(self.groups.starts, self.groups.sizes, strict=True)]


def fill(mask: NDArray[np.bool_], flat: Sequence[float] | NDArray, dtype: type = np.float64) -> NDArray:
    """Return an array of the mask's shape with the flat values where the mask is True, row by row, and 0 elsewhere."""
    out: NDArray = np.zeros(mask.shape, dtype=dtype)
    out[mask] = np.asarray(flat, dtype=dtype)
    return out


def whiten(values: Floats, tokens: NDArray[np.int64], magnitude: float | None = None) -> Floats:
    """Return (x - mean) / sqrt(var + 1e-8), [M, T], where each value is weighted by its number of sampled tokens.

    The variance is unbiased (REINFORCE++, 2501.03262). The result is exactly 0 if all values are equal up to rounding,
    or if there are fewer than two tokens.

    Args:
        tokens: [M, T] number of sampled tokens; the result is 0 where it is 0.
        magnitude: sum of the absolute terms that the values were summed from, as in `Peers.magnitudes`; None: the
            values are not sums.
    """
    sampled = tokens > 0
    present, counts = values[sampled], tokens[sampled]
    if counts.sum() < 2 or np.ptp(present) <= ROUNDING * (abs(present).max() if magnitude is None else magnitude):
        return np.zeros_like(values)
    centred = present - np.average(present, weights=counts)
    variance = (counts * np.square(centred)).sum() / (counts.sum() - 1)
    return fill(sampled, centred / np.sqrt(variance + WHITEN_EPSILON))


def discounted_sums(values: Floats, discount: float) -> Floats:
    """Return y_t = x_t + discount * y_{t+1} along the rows of [M, T]: returns-to-go of rewards, or GAE of TD errors.

    Each chunk of columns is one product with a triangular matrix of powers, so that a row of thousands of tokens needs
    no Python loop over tokens. The padding on the right must be 0.
    """
    rows, columns = values.shape
    out = np.empty_like(values)
    later = np.zeros(rows)
    for low in reversed(range(0, columns, CHUNK)):
        width = min(CHUNK, columns - low)
        distance = np.arange(width)[:, None] - np.arange(width)  # [s, t]: s - t
        powers = np.where(distance >= 0, float(discount) ** np.maximum(distance, 0), 0.0)
        decay = float(discount) ** np.arange(width, 0, -1)
        out[:, low : low + width] = values[:, low : low + width] @ powers + later[:, None] * decay
        later = out[:, low]
    return out
