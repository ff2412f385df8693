"""GiGPO: trajectories are compared within their group, and turns with turns that have the same observation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrl.algorithms.advantages.baselines import STD_EPSILON, per_trajectory, z_score
from mtrl.algorithms.batch import CreditBatch, Floats, Peers, discounted_sums, fill
from mtrl.algorithms.registry import advantage_estimator
from mtrl.config.algorithm_schema import AlgorithmConfig


@advantage_estimator("gigpo", needs_group=True)
def gigpo(batch: CreditBatch, config: AlgorithmConfig) -> Floats:
    """A^E + `turn_advantage_coef` A^S (GiGPO, 2505.10978), each a z-score; without `norm_by_std`, each the difference
    from the mean.

    A^E compares the sum of all rewards of a trajectory with its group. A^S compares the returns-to-go, discounted by
    `gamma` (0.95 in the paper), of the turns of the group that have the same observation, including turns of the same
    trajectory. An observation that occurs once gives A^S = 0.
    """
    compare = z_score(config, STD_EPSILON)
    same = anchors(batch)
    order = np.argsort(same, kind="stable")
    returns = discounted_sums(batch.rewards, config.gamma)[batch.mask][order]
    magnitudes = discounted_sums(abs(batch.rewards), config.gamma)[batch.mask][order]
    steps = np.empty_like(returns)
    steps[order] = compare(returns, Peers(same[order], magnitudes))
    return per_trajectory(batch, config, compare) + config.turn_advantage_coef * fill(batch.mask, steps)


def anchors(batch: CreditBatch) -> NDArray[np.int64]:
    """Return an id per turn, trajectory by trajectory, that is equal for turns of a group with the same observation.

    Observations are compared by the content of their messages, without the id of a tool call, which is random in every
    trajectory.
    """
    numbers: defaultdict[Hashable, int] = defaultdict(count().__next__)  # equal keys get equal numbers
    same = []
    for owner, turn in zip(np.repeat(batch.group, batch.mask.sum(axis=1)).tolist(), batch.turns, strict=True):
        key: tuple[Any, ...] = (owner,)
        for message in turn.observation:
            key += message.get("role"), message.get("name"), message.get("content"), message.get("tool_calls")
        try:
            same.append(numbers[key])
        except TypeError:  # content in parts, or tool calls: lists are not hashable
            same.append(numbers[json.dumps(key, sort_keys=True, default=repr)])
    return np.array(same, dtype=np.int64)
