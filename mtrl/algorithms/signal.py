"""Signal: metrics of groups with and without a gradient. A group has none if all advantages of its trainable
trajectories are 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from mtrl.algorithms.batch import ROUNDING, Ragged
from mtrl.types import Group, Trajectory


def is_informative(group: Group, advantages: Ragged) -> bool:
    """Return whether any turn of a trainable trajectory of the group has an advantage other than 0."""
    pairs = zip(group.trajectories, advantages, strict=True)
    return any(value != 0.0 for trajectory, turns in pairs if trajectory.trainable for value in turns)


def lonely_turns(rewards: Ragged) -> int:
    """Return the number of turns that only one trajectory of the group reached, for which `group_based_per_turn` has no
    baseline."""
    longest, second = sorted([0, 0, *map(len, rewards)], reverse=True)[:2]
    return longest - second


def earned(trajectory: Trajectory) -> float:
    """Return the reward of a trajectory; exactly 0 where the rewards of its turns cancel up to rounding."""
    total = math.fsum(trajectory.rewards)
    return total if abs(total) > ROUNDING * math.fsum(map(abs, trajectory.rewards)) else 0.0


def signal_metrics(groups: Sequence[Group], advantages: Sequence[Ragged]) -> dict[str, float]:
    """Return metrics of the rewards and advantages of one step's groups; `advantages[p]` belongs to `groups[p]`.

    `rollout/reward/mean`        mean trajectory reward
    `rollout/reward/zero_frac`   share of trajectories whose reward is 0
    `rollout/reward/early_frac`  share of trajectories with a reward other than 0 before their last turn: near 0, only
                                 outcomes are rewarded, and credit per turn has no additional information
    `rollout/reward/valid_mean`  mean trajectory reward over informative groups; absent without such groups
    `analysis/zero_adv_groups`   number of groups without an advantage, and `analysis/zero_adv_frac` their share
    `analysis/informative_groups` number of the other groups
    `analysis/lonely_turns`      number of turns that no peer reached
    `analysis/lonely_trajectories` number of groups with a single trajectory, which has no peer to compare with

    In self-play each role of a group counts as a group. A summary of the context is no turn here. The result is empty
    without trajectories.
    """
    groups, advantages = _by_role(groups, advantages)
    rewards = [[earned(trajectory) for trajectory in group.trajectories] for group in groups]
    informative = [is_informative(*pair) for pair in zip(groups, advantages, strict=True)]
    everything = [reward for group in rewards for reward in group]
    valid = [reward for group, has_signal in zip(rewards, informative, strict=True) if has_signal for reward in group]
    if not everything:
        return {}
    zero_groups = informative.count(False)
    taken = [[[turn.reward for turn in t.environment_turns] for t in group.trajectories] for group in groups]
    early = [any(rewards[:-1]) for group in taken for rewards in group]
    metrics = {
        "rollout/reward/mean": fmean(everything),
        "rollout/reward/zero_frac": fmean(reward == 0.0 for reward in everything),
        "rollout/reward/early_frac": fmean(early),
        "analysis/zero_adv_groups": float(zero_groups),
        "analysis/zero_adv_frac": zero_groups / len(groups),
        "analysis/informative_groups": float(informative.count(True)),
        "analysis/lonely_turns": float(sum(map(lonely_turns, taken))),
        "analysis/lonely_trajectories": float(sum(len(group.trajectories) == 1 for group in groups)),
    }
    return {**metrics, "rollout/reward/valid_mean": fmean(valid)} if valid else metrics


def _by_role(groups: Sequence[Group], advantages: Sequence[Ragged]) -> tuple[list[Group], list[Ragged]]:
    """Return the groups of each role, with the advantages of their trajectories."""
    found = {
        id(trajectory): turns
        for group, own in zip(groups, advantages, strict=True)
        for trajectory, turns in zip(group.trajectories, own, strict=True)
    }
    parts = [part for group in groups for part in group.by_role()]
    return parts, [[found[id(trajectory)] for trajectory in part.trajectories] for part in parts]
