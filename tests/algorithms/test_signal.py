"""Metrics of the signal in a step's groups."""

import pytest
from groups import METHODS, group, make_group
from hypothesis import given, settings

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import earned, is_informative, lonely_turns, signal_metrics
from mtrl.config.algorithm_schema import AlgorithmConfig, PassKConfig


def a_group(name, *rewards):
    """Return a group; its name describes its purpose."""
    return make_group(rewards)


def metrics(*groups, method="grpo"):
    config = AlgorithmConfig(advantage_method=method)
    return signal_metrics(groups, turn_advantages(groups, config))


def test_metrics_of_a_mixed_step():
    step = metrics(
        a_group("mixed", [0.0, 1.0], [0.0]),  # informative, mean 0.5
        a_group("solved", [1.0], [1.0]),  # equal: nothing to learn
        a_group("hopeless", [0.0], [0.0, 0.0]),
        a_group("graded", [0.25], [0.75]),  # informative, mean 0.5, no reward of 0
    )
    assert step == {
        "rollout/reward/mean": pytest.approx((1 + 0 + 1 + 1 + 0 + 0 + 0.25 + 0.75) / 8),
        "rollout/reward/zero_frac": 3 / 8,
        "rollout/reward/early_frac": 0.0,
        "rollout/reward/valid_mean": 0.5,
        "analysis/zero_adv_groups": 2.0,
        "analysis/zero_adv_frac": 0.5,
        "analysis/informative_groups": 2.0,
        "analysis/lonely_turns": 2.0,
        "analysis/lonely_trajectories": 0.0,
    }


def test_without_signal_there_is_no_valid_mean():
    step = metrics(a_group("solved", [1.0], [1.0]))
    assert "rollout/reward/valid_mean" not in step
    assert step["analysis/zero_adv_frac"] == 1.0
    assert signal_metrics([], []) == {}


def test_equal_outcomes_can_be_informative_per_turn():
    """The totals are equal, but the rewards are at different turns: grpo has no signal, and a method per turn has
    one."""
    group = a_group("late and early", [1.0, 0.0], [0.0, 1.0])
    assert metrics(group)["analysis/informative_groups"] == 0.0
    assert metrics(group, method="group_based_per_turn")["analysis/informative_groups"] == 1.0


def test_summaries_of_the_context_are_no_turns():
    group = a_group("folded", [0.0, 0.0, 1.0, 0.0], [0.0, 0.0])
    for index in (1, 3):
        group.trajectories[0].turns[index].is_summary = True
    step = metrics(group, method="group_based_per_turn")
    assert (step["analysis/lonely_turns"], step["rollout/reward/early_frac"]) == (0.0, 0.0)


def test_rewards_before_the_last_turn_are_counted_apart_from_outcomes():
    """Credit per turn has no additional information if only the last turn has a reward."""
    outcomes = a_group("outcomes", [0.0, 0.0, 1.0], [0.0, 0.0], [1.0])
    turns = a_group("turns", [0.5, 0.0], [0.0, -0.5, 1.0], [2.0], [])
    assert metrics(outcomes)["rollout/reward/early_frac"] == 0.0
    assert metrics(turns)["rollout/reward/early_frac"] == 2 / 4
    assert metrics(outcomes, turns)["rollout/reward/early_frac"] == 2 / 7


def test_rewards_that_cancel_are_zero():
    """0.1 + 0.2 - 0.3 is 5.6e-17 in floats."""
    step = metrics(a_group("cancelling", [0.1, 0.2, -0.3], [0.3, -0.3], [1e-9]))
    assert step["rollout/reward/zero_frac"] == 2 / 3


@settings(deadline=None)
@given(rewards=group)
def test_earned_is_the_reward(rewards):
    for trajectory in make_group(rewards).trajectories:
        assert earned(trajectory) == pytest.approx(trajectory.reward, abs=1e-12)


@settings(deadline=None)
@given(rewards=group)
def test_scalar_and_per_turn_rewards_give_the_same_metrics(rewards):
    """This holds for methods that use whole trajectories. Metrics that depend on the turn of a reward differ."""
    at_the_end = [[*[0.0] * (len(turns) - 1), sum(turns)] for turns in rewards]
    for method in ("grpo", "rloo", "opo", "gpg", "maxrl", "reinforce_pp_baseline"):
        spread, late = metrics(make_group(rewards), method=method), metrics(make_group(at_the_end), method=method)
        early = "rollout/reward/early_frac"
        assert {k: v for k, v in spread.items() if k != early} == {k: v for k, v in late.items() if k != early}
        assert late[early] == 0.0


@pytest.mark.parametrize("method", [name for name, entry in METHODS.items() if entry.needs_group])
def test_trajectories_without_peers_are_counted(method):
    config = AlgorithmConfig(advantage_method=method, passk=PassKConfig(k=1))
    groups = [a_group("alone", [1.0, 0.5]), a_group("together", [1.0], [0.0]), a_group("alone too", [0.0])]
    alone = signal_metrics(groups[:1], turn_advantages(groups[:1], config))
    assert (alone["analysis/lonely_trajectories"], alone["analysis/informative_groups"]) == (1.0, 0.0)
    assert alone["analysis/lonely_turns"] == 2.0
    assert signal_metrics(groups, turn_advantages(groups, config))["analysis/lonely_trajectories"] == 2.0


@pytest.mark.parametrize(
    ("rewards", "lonely"),
    [([], 0), ([[0.0]], 1), ([[0.0] * 3, [0.0]], 2), ([[0.0] * 3, [0.0] * 3, [0.0]], 0), ([[], [0.0] * 2], 2)],
)
def test_lonely_turns(rewards, lonely):
    assert lonely_turns(rewards) == lonely


def test_informative_needs_one_advantage():
    pair = make_group([[0.0, 0.0], [0.0, 0.0]])
    assert not is_informative(pair, [[0.0, -0.0], []])
    assert is_informative(pair, [[0.0], [0.0, -1e-300]])


def test_advantages_of_trajectories_that_are_not_trained_are_no_signal():
    """An overlong trajectory counts in the baseline of its group, and only the others have a gradient."""
    pair = make_group([[0.2], [0.0]])
    for trajectory, informative in zip(pair.trajectories, (1.0, 0.0), strict=True):
        trajectory.trainable = False
        assert metrics(pair)["analysis/informative_groups"] == informative
