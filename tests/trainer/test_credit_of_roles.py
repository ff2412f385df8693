"""Advantages of self-play: the trajectories of a role are compared with those of the same role only."""

import random

import pytest
from helpers import make_turn

from mtrl.algorithms.signal import signal_metrics
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.config.schema import RewardConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.rollouts import RolloutReport
from mtrl.trainer.data.samples import advantages_of
from mtrl.trainer.rollout_metrics import group_reward_std, role_metrics
from mtrl.types import Group, Trajectory, trajectory_from_dict

OUTCOMES = {"x": (1.0, 1.0, 1.0, -1.0), "o": (-1.0, -1.0, -1.0, 1.0)}
COMPOSER = RewardComposer(RewardConfig())


def group_of(outcomes, name="g"):
    """Return a group whose trajectories have one turn, with the roles in turn."""
    rng, trajectories = random.Random(0), []
    for episode in range(len(next(iter(outcomes.values())))):
        for role, rewards in outcomes.items():
            turns = [make_turn(rng, 50, reward=rewards[episode])]
            trajectories.append(Trajectory("t", name, len(trajectories), turns, role=role))
    return Group(name, {"id": "t"}, trajectories)


@pytest.mark.parametrize(
    ("method", "won", "lost"),
    [
        ("rloo", 1 - 1 / 3, -1 - 1.0),  # x: three wins and a loss; the mean of the others is 1/3, and 1 for the loss
        ("dr_grpo", 1 - 0.5, -1 - 0.5),
        ("grpo", 0.5 / (1.0 + 1e-6), -1.5 / (1.0 + 1e-6)),  # the unbiased deviation is 1
    ],
)
def test_the_baseline_is_that_of_the_role(method, won, lost):
    (found,) = advantages_of([group_of(OUTCOMES)], AlgorithmConfig(advantage_method=method), COMPOSER)
    x, o = found[0::2], found[1::2]
    assert x == [[pytest.approx(value)] for value in (won, won, won, lost)]
    assert o == [[pytest.approx(-value)] for value in (won, won, won, lost)]


def test_estimators_of_the_batch_normalise_each_role_by_itself():
    groups = [group_of(OUTCOMES, "g"), group_of({"x": (1.0, -1.0), "o": (-1.0, 1.0)}, "h")]
    config = AlgorithmConfig(advantage_method="reinforce_pp_baseline")
    found = advantages_of(groups, config, COMPOSER)
    for place, role in enumerate(OUTCOMES):
        alone = [part for group in groups for part in group.by_role() if part.role == role]
        assert [own[place::2] for own in found] == advantages_of(alone, config, COMPOSER)


def test_a_role_without_an_advantage_is_counted():
    """Side x always wins and side o differs only by its rewards, so one of the two parts has a signal."""
    group = group_of({"x": (1.0, 1.0), "o": (-1.0, 0.0)})
    advantages = advantages_of([group], AlgorithmConfig(advantage_method="rloo"), COMPOSER)
    metrics = signal_metrics([group], advantages)
    assert (metrics["analysis/zero_adv_groups"], metrics["analysis/informative_groups"]) == (1.0, 1.0)
    assert metrics["rollout/reward/mean"] == pytest.approx(0.25)
    assert group_reward_std([group]) == pytest.approx(0.25)  # 0 for x, 0.5 for o


def test_metrics_of_a_role_are_means_over_its_own_trajectories():
    group = group_of(OUTCOMES)
    for trajectory in group.trajectories:
        trajectory.score = float(trajectory.reward > 0)
    group.trajectories[1].turns.append(make_turn(random.Random(1), 50))
    metrics = role_metrics(RolloutReport([group]))
    found = {role: [metrics[f"rollout/{role}/{name}/mean"] for name in ("success", "reward", "turns")] for role in "xo"}
    assert found == {"x": [0.75, 0.5, 1.0], "o": [0.25, -0.5, 1.25]}
    for trajectory in group.trajectories:
        trajectory.role = None
    assert role_metrics(RolloutReport([group])) == {}, "a run without self-play has no roles"


def test_files_from_before_roles_can_be_read():
    data = {"task_id": "t", "group_id": "g", "index": 0, "turns": [], "stop_reason": "done"}
    assert trajectory_from_dict(data).role is None
