"""Experience: dynamic sampling fills a step with groups that have an advantage, within its bound; overlong trajectories
are not trained."""

import asyncio
from dataclasses import replace

import pytest
from helpers import make_group
from streams import FAMILY

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.signal import is_informative
from mtrl.config.schema import Config, RewardConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.rollouts import RolloutReport
from mtrl.trainer.data.experience import Collector, NoSignalError, Unused
from mtrl.trainer.data.samples import group_samples
from mtrl.types import FinishReason, Group, StopReason


class FakeRollouts:
    """Stand-in for rollouts: row n becomes a group whose rewards differ if `teaches(n)`."""

    def __init__(self, teaches):
        self.teaches, self.keys = teaches, []

    async def collect(self, key, rows, size, sampling, replacement):
        self.keys.append((key, [row["n"] for row in rows]))
        groups = [self.group(f"{key}/{i}", row, size(row)) for i, row in enumerate(rows)]
        return RolloutReport(groups, episodes=len(rows))

    def group(self, group_id, row, size):
        group = make_group(row["n"], 50, size)
        for trajectory in group.trajectories:
            trajectory.group_id = group_id
            for turn in trajectory.turns:
                turn.reward = 0.0
            trajectory.turns[-1].reward = float(trajectory.index % 2) if self.teaches(row["n"]) else 1.0
        return Group(group_id, row, group.trajectories)


def collector(teaches, **algorithm):
    config = Config(run_dir="unused")
    config.trainer.prompts_per_step = 4
    config.algorithm = replace(config.algorithm, group_size=4, **algorithm)
    numbers = iter(range(10**6))
    rollouts = FakeRollouts(teaches)
    composer = RewardComposer(RewardConfig())
    return Collector(config, rollouts, composer, FAMILY, None, lambda: {"n": next(numbers)}), rollouts


def collect(teaches, step=3, **algorithm):
    found, rollouts = collector(teaches, **algorithm)
    return asyncio.run(found.collect(step)), rollouts


def test_without_dynamic_sampling_all_groups_are_trained():
    experience, rollouts = collect(lambda n: False)
    assert rollouts.keys == [("step3", [0, 1, 2, 3])]
    assert len(experience.groups) == 4 and not experience.set_aside and experience.rounds == 0


@pytest.mark.parametrize("method", ["grpo", "group_based_per_turn", "reinforce_pp_baseline"])
def test_groups_without_an_advantage_are_replaced_until_the_step_is_full(method):
    experience, rollouts = collect(lambda n: n % 3 == 0, dynamic_sampling_rounds=9, advantage_method=method)
    assert [group.row["n"] for group in experience.groups] == [0, 3, 6, 9]
    assert [group.row["n"] for group in experience.set_aside] == [1, 2, 4, 5, 7, 8]
    assert rollouts.keys == [
        ("step3", [0, 1, 2, 3]),
        ("step3.1", [4, 5]),
        ("step3.2", [6, 7]),
        ("step3.3", [8]),
        ("step3.4", [9]),
    ]
    advantages = turn_advantages(experience.groups, replace(Config().algorithm))
    assert all(is_informative(*pair) for pair in zip(experience.groups, advantages, strict=True))
    assert len({group.group_id for group in experience.report.groups}) == 10  # the seed of each stream is different
    assert experience.report.episodes == 10
    assert experience.metrics()["analysis/set_aside_groups"] == 6.0
    assert experience.metrics()["analysis/sampling_rounds"] == 4.0


def test_turn_rewards_can_have_a_signal_without_different_outcomes():
    """Groups with equal sums but rewards at different turns have an advantage under a per-turn estimator."""

    class Early(FakeRollouts):
        def group(self, group_id, row, size):
            group = super().group(group_id, row, size)
            for trajectory in group.trajectories:
                trajectory.turns = (trajectory.turns * 2)[:2]
                first, last = (replace(turn) for turn in trajectory.turns)
                first.reward, last.reward = (0.25, 0.75) if trajectory.index % 2 else (0.75, 0.25)
                trajectory.turns = [first, last]
            return group

    for method, full in (("group_based_per_turn", True), ("grpo", False)):
        found, _ = collector(lambda n: True, advantage_method=method, dynamic_sampling_rounds=2)
        found.rollouts = Early(lambda n: True)
        if full:
            assert asyncio.run(found.collect(0)).rounds == 0
        else:
            with pytest.raises(NoSignalError):
                asyncio.run(found.collect(0))


def test_exceeding_the_bound_is_an_error_in_one_sentence():
    with pytest.raises(
        NoSignalError,
        match=r"algorithm\.dynamic_sampling_rounds=2 rounds of new prompts only 1 of 10 groups had an advantage, and a "
        r"step needs trainer\.prompts_per_step=4 \(the mean reward is 0\.950\)",
    ):
        collect(lambda n: n == 2, dynamic_sampling_rounds=2)


def test_a_trajectory_with_a_cut_turn_is_overlong_for_any_stop_reason():
    found, rollouts = collector(lambda n: True, overlong_filtering=True)
    make = rollouts.group

    def cut(group_id, row, size):
        group = make(group_id, row, size)
        for trajectory in group.trajectories:
            trajectory.stop_reason = StopReason.DONE
            trajectory.turns[0].finish = FinishReason.LENGTH
        return group

    rollouts.group = cut
    assert asyncio.run(found.collect(0)).metrics()["analysis/untrained_frac"] == 1.0


def test_overlong_trajectories_are_not_trained_on_but_count_in_the_baseline():
    found, rollouts = collector(lambda n: True, overlong_filtering=True)
    make = rollouts.group

    def cut(group_id, row, size):
        group = make(group_id, row, size)
        group.trajectories[0].stop_reason = StopReason.CONTEXT_LIMIT
        group.trajectories[1].stop_reason = StopReason.TURN_TOKEN_LIMIT
        group.trajectories[2].stop_reason = StopReason.MAX_TURNS  # this limit is not one of length
        return group

    rollouts.group = cut
    experience = asyncio.run(found.collect(0))
    assert experience.metrics()["analysis/untrained_frac"] == 0.5
    (group, *_) = experience.groups
    advantages = turn_advantages([group], found.config.algorithm)[0]
    assert {sample.trajectory for sample in group_samples(group, advantages)} == {2, 3}
    assert [round(turns[0], 3) for turns in advantages] == [-0.667, 0.667, -0.667, 0.667]


def test_dynamic_sampling_replaces_groups_whose_only_signal_is_not_trained():
    found, rollouts = collector(lambda n: True, overlong_filtering=True, dynamic_sampling_rounds=4)
    make = rollouts.group

    def cut(group_id, row, size):
        group = make(group_id, row, size)
        for trajectory in group.trajectories:
            if row["n"] % 2:
                trajectory.stop_reason = StopReason.CONTEXT_LIMIT
        return group

    rollouts.group = cut
    experience = asyncio.run(found.collect(0))
    assert [group.row["n"] % 2 for group in experience.groups] == [0] * 4
    assert {group.row["n"] % 2 for group in experience.set_aside} == {1}


def test_the_success_of_a_row_has_the_tolerance_of_evaluations():
    """The sum of ten scores of 0.1 is less than 1 by rounding."""
    noted, scores = [], iter([sum([0.1] * 10), 0.99, 0.0, 1.0] * 4)
    found, _ = collector(lambda n: True)
    found.note_success = lambda row, success: noted.append(success)
    found.family = replace(FAMILY, score=lambda trajectory, row: next(scores))
    asyncio.run(found.collect(0))
    assert noted == [0.5] * 4


def test_prompts_of_an_earlier_run_are_not_trained_twice_if_weights_do_not_reach_the_engine():
    """Then the step counts, and `publish` is not called."""
    found, _ = collector(lambda n: True)
    stored = [Unused(number, 0, Group(f"step0/{number}", {"n": -number}, [])).to_dict() for number in range(1, 6)]
    found.restore(stored)
    assert {group.row["n"] for group in asyncio.run(found.collect(0)).groups} == {-1, -2, -3, -4}
    assert found.state() == stored, "an update that fails leaves them to the next run"
    found.trained()
    assert found.state() == stored[4:]
