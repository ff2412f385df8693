"""What an advantage estimator sees: the rewards of a whole step as one array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mtrl.algorithms.peers import ROUNDING, Floats, Peers
from mtrl.types import Group, Trajectory, Turn

Ragged = list[list[float]]
"""One number per turn: G lists of T_i floats."""

WHITEN_EPSILON = 1e-8

CHUNK = 64
"""Columns that `discounted_sums` does in one matrix product."""


@dataclass(frozen=True)
class CreditBatch:
    """M trajectories x T turns, padded on the right; the trajectories of a group stand side by side.

    For an estimator that works per token the columns are the sampled tokens of each trajectory instead of its turns.
    """

    rewards: Floats
    """[M, T]; 0 in the padding."""
    mask: NDArray[np.bool_]
    """[M, T]; True where there is a turn."""
    tokens: NDArray[np.int64]
    """[M, T] sampled tokens of each turn; 0 in the padding."""
    group: NDArray[np.int64]
    """[M] index of the group, ascending."""
    trajectories: Sequence[Trajectory] = ()
    """The M trajectories, for what is not a number: observations, components of the reward."""
    component_weights: Mapping[str, float] = field(default_factory=dict)
    """`reward.components`: weight by name."""
    values: Floats | None = None
    """[M, T] the critic's values before each turn; 0 in the padding. None without a critic."""

    @classmethod
    def of(cls, groups: Sequence[Group], component_weights: Mapping[str, float] | None = None) -> CreditBatch:
        """The turns of these groups."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        lengths = np.array([len(t.turns) for t in trajectories], dtype=np.int64)
        mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        return cls(
            rewards=fill(mask, [turn.reward for turn in turns]),
            mask=mask,
            tokens=fill(mask, [len(turn.action_ids) for turn in turns], np.int64),
            group=np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
            trajectories=trajectories,
            component_weights=component_weights or {},
        )

    @property
    def turns(self) -> list[Turn]:
        """The turns of all trajectories: what is True in the mask, row by row."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]

    @cached_property
    def outcomes(self) -> Floats:
        """[M] the reward of every trajectory; `fsum`, so that the order in which turns were paid cannot matter."""
        return np.array([math.fsum(row) for row in self.rewards.tolist()], dtype=np.float64)

    @cached_property
    def magnitudes(self) -> Floats:
        """[M] the rewards of every trajectory added up without signs: what the rounding of its sums is a share of."""
        return abs(self.rewards).sum(axis=1)

    @cached_property
    def groups(self) -> Peers:
        """Which of the M outcomes are compared."""
        return Peers(self.group, self.magnitudes)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[M] sampled tokens of every trajectory."""
        return self.tokens.sum(axis=1)

    def broadcast(self, per_trajectory: Floats) -> Floats:
        """[M, T] one value per trajectory, on all of its turns."""
        return np.where(self.mask, per_trajectory[:, None], 0.0)

    def ragged(self, advantages: Floats) -> list[Ragged]:
        """[M, T] without its padding: a list per group, of a list per trajectory, of a float per turn."""
        flat = advantages[self.mask].tolist()
        ends = np.cumsum(self.mask.sum(axis=1)).tolist()
        rows = [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        return [rows[start : start + size] for start, size in zip(self.groups.starts, self.groups.sizes, strict=True)]


def fill(mask: NDArray[np.bool_], flat: Sequence[float] | NDArray, dtype: type = np.float64) -> NDArray:
    """An array of the mask's shape with the flat values where it is True, row by row, and 0 elsewhere."""
    out: NDArray = np.zeros(mask.shape, dtype=dtype)
    out[mask] = np.asarray(flat, dtype=dtype)
    return out


def whiten(values: Floats, tokens: NDArray[np.int64], magnitude: float | None = None) -> Floats:
    """(x - mean) / sqrt(var + 1e-8) over all sampled tokens of [M, T]: every value counts as often as it has tokens.

    The variance is unbiased (REINFORCE++, 2501.03262). All equal up to rounding, or less than two tokens: exactly 0.

    Args:
        tokens: [M, T]; where there are none the result is 0.
        magnitude: what the values were summed from, as in `Peers.magnitudes`; None: they are no sums.
    """
    sampled = tokens > 0
    present, counts = values[sampled], tokens[sampled]
    if counts.sum() < 2 or np.ptp(present) <= ROUNDING * (abs(present).max() if magnitude is None else magnitude):
        return np.zeros_like(values)
    centred = present - np.average(present, weights=counts)
    variance = (counts * np.square(centred)).sum() / (counts.sum() - 1)
    return fill(sampled, centred / np.sqrt(variance + WHITEN_EPSILON))


def discounted_sums(values: Floats, discount: float) -> Floats:
    """y_t = x_t + discount * y_{t+1} along the rows of [M, T]: returns-to-go of rewards, GAE of TD errors.

    Chunks of columns are one product with a triangular matrix of powers each, so a row of thousands of tokens costs
    no Python per token. Padding on the right must be 0.
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
