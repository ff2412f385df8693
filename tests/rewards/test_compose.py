"""Composition of rewards: weights, sources, levels, functions of the user, and errors for wrong input."""

import asyncio
import copy
import math

import numpy as np
import pytest
from omegaconf import OmegaConf

from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.types import FinishReason, Group, Trajectory, Turn, to_json

ROW = {"id": "7", "prompt": [], "ground_truth": {"answer": "42"}}


def a_turn(reward=0.0, tokens=1, **components):
    ids, logprobs = list(range(tokens)), [-0.1] * tokens
    message = {"role": "assistant", "content": f"reward {reward}"}
    return Turn([1], ids, logprobs, [(0, tokens)], FinishReason.STOP, "", message, reward=reward, components=components)


def a_group(*trajectories):
    return Group("g7", ROW, [Trajectory("7", "g7", i, list(turns)) for i, turns in enumerate(trajectories)])


def composed(group, level="turn", **components):
    composer = RewardComposer(RewardConfig(level=level, components=components))
    composer.apply(group)
    return [trajectory.rewards for trajectory in group.trajectories]


# ---- functions of the user, by their dotted path


def last_word(messages, row):
    assert row == ROW
    return len(messages)


async def judge(messages, row, *, strictness=1.0):
    await asyncio.sleep(0)
    return 0.5 * strictness, {"judge/seen": float(len(messages))}


def refuses(messages, row):
    raise KeyError("answer")


def says_yes(messages, row):
    return "yes"


def normalises(messages, row):
    row["ground_truth"]["answer"] += "0"
    messages[-1]["content"] = messages[-1]["content"].upper()
    return 1.0


def compares(group):
    group.row["ground_truth"]["answer"] += "0"
    return [1.0] * len(group.trajectories)


THIS = __name__


# ---- weights and sources


def test_the_default_is_the_identity():
    group = a_group([a_turn(0.25, bonus=1.0), a_turn(1.0)], [a_turn(0.0)], [])
    before = to_json(group)
    RewardComposer(RewardConfig()).apply(group)
    assert to_json(group) == before


def test_weighted_sum_of_environment_and_reported_components():
    group = a_group([a_turn(1.0, format=0.5), a_turn(2.0)], [a_turn(0.0, format=1.0)])
    assert composed(group, environment=2.0, format=-0.5) == [[1.75, 4.0], [-0.5]]


def test_the_environments_own_reward_can_be_left_out():
    group = a_group([a_turn(1.0, answer=0.0, format=0.3)])
    assert composed(group, answer=1.0, format=1.0) == [[0.3]]
    assert group.trajectories[0].turns[0].components["environment"] == 1.0
    assert composed(group, environment=1.0) == [[1.0]]


def test_components_are_stored_unweighted():
    group = a_group([a_turn(1.0, format=0.5, tool_calls=3.0), a_turn(2.0)])
    composed(group, environment=2.0, format=-0.5, turn_penalty=0.1)
    first, second = (turn.components for turn in group.trajectories[0].turns)
    assert first == {"environment": 1.0, "format": 0.5, "tool_calls": 3.0, "turn_penalty": 0.0}
    assert second == {"environment": 2.0, "format": 0.0, "turn_penalty": -1.0}


def test_composing_again_starts_from_what_the_environment_returned():
    group = a_group([a_turn(1.0), a_turn(2.0)])
    for _ in range(2):
        assert composed(group, environment=3.0) == [[3.0, 6.0]]
    assert composed(group, level="trajectory", environment=1.0) == [[0.0, 3.0]]
    assert composed(group, environment=1.0) == [[1.0, 2.0]]


def test_trajectory_level_gives_the_sum_to_the_last_turn():
    group = a_group([a_turn(0.5), a_turn(0.25, format=1.0), a_turn(0.0)], [a_turn(2.0)], [])
    assert composed(group, level="trajectory", environment=1.0, format=2.0) == [[0.0, 0.0, 2.75], [2.0], []]


def test_shaping_takes_its_parameters_from_the_config():
    group = a_group([a_turn(1.0, tokens=10), a_turn(1.0, tokens=15), a_turn(1.0, tokens=40)])
    penalty = {"weight": 0.2, "max_tokens": 20, "buffer_tokens": 10}
    assert composed(group, environment=1.0, length_penalty=penalty) == [[1.0, 0.9, 0.8]]


def test_a_config_of_omegaconf_works():
    config = OmegaConf.structured(RewardConfig(components={"environment": 1, "turn_penalty": {"weight": 0.5}}))
    group = a_group([a_turn(1.0), a_turn(1.0)])
    RewardComposer(config).apply(group)
    assert group.trajectories[0].rewards == [1.0, 0.5]


# ---- functions of the user


def test_the_value_of_a_function_is_the_reward_of_the_last_turn():
    group = a_group([a_turn(1.0), a_turn(1.0)], [a_turn(0.0)], [])
    assert composed(group, environment=1.0, **{f"{THIS}.last_word": 10.0}) == [[1.0, 21.0], [10.0], []]


def test_an_async_function_with_parameters_and_metrics():
    group = a_group([a_turn(1.0), a_turn(1.0)])
    spec = {"target": f"{THIS}.judge", "weight": 2.0, "strictness": 3.0}
    assert composed(group, quality=spec) == [[0.0, 3.0]]
    assert group.trajectories[0].metrics == {"judge/seen": 2.0}
    assert group.trajectories[0].turns[1].components["quality"] == 1.5


def test_apply_and_apply_async_work_in_a_running_event_loop():
    groups = [a_group([a_turn(1.0)]), a_group([a_turn(1.0)])]
    composer = RewardComposer(RewardConfig(components={f"{THIS}.judge": 1.0}))

    async def main():
        composer.apply(groups[0])
        await composer.apply_async(groups[1])

    asyncio.run(main())
    assert [group.trajectories[0].rewards for group in groups] == [[0.5], [0.5]]


def test_async_functions_run_concurrently_over_a_group():
    """The function is called for all trajectories at once: each call waits until all four have begun."""
    barrier = asyncio.Barrier(4)

    async def waits(messages, row):
        await asyncio.wait_for(barrier.wait(), timeout=5)
        return 1.0

    globals()["waits"] = waits
    assert composed(a_group(*[[a_turn()]] * 4), **{f"{THIS}.waits": 1.0}) == [[1.0]] * 4


def test_functions_of_the_user_change_neither_the_row_nor_the_messages():
    """A reward that normalised the ground truth in place changed what later episodes of the row observed."""
    group, row = a_group([a_turn()], [a_turn()]), copy.deepcopy(ROW)
    assert composed(group, **{f"{THIS}.normalises": 1.0, f"{THIS}.compares": 1.0}) == [[2.0], [2.0]]
    assert row == ROW == group.row
    assert [turn.message["content"] for each in group.trajectories for turn in each.turns] == ["reward 0.0"] * 2


def test_an_error_of_a_user_function_names_component_and_trajectory():
    """One sentence with the place in the user's file, and not a traceback."""
    place = rf"reward.components.{THIS}.refuses failed: KeyError in {THIS}.py, line \d+: "
    with pytest.raises(UserError, match=f"^{place}.*; fix the reward function$"):
        composed(a_group([a_turn()]), **{f"{THIS}.refuses": 1.0})


# ---- wrong input


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e50, -1e12, None, "1.0", [1.0], "x"])
@pytest.mark.parametrize("components", [{"environment": 1.0}, {"environment": 0.5, "turn_penalty": 0.1}])
def test_a_reward_that_is_not_a_finite_number_is_refused(reward, components):
    group = a_group([a_turn(1.0)], [a_turn(0.0), a_turn(reward)])
    with pytest.raises(UserError, match=r"environment of trajectory 1 of group g7 \(task 7\), turn 1, is .* finite"):
        composed(group, **components)


@pytest.mark.parametrize("level", ["turn", "trajectory"])
def test_a_weighted_sum_that_is_too_large_is_refused(level):
    group = a_group([a_turn(9e11)])
    with pytest.raises(UserError, match="the sum of reward.components of trajectory 0 .* is 9e\\+20; a reward must be"):
        composed(group, level=level, environment=1e9)


def test_components_that_are_not_finite_numbers_are_refused():
    with pytest.raises(UserError, match="reward format of trajectory 0"):
        composed(a_group([a_turn(1.0, format=math.nan)]), environment=1.0, format=1.0)
    with pytest.raises(UserError, match="says_yes of trajectory 0 .* is 'yes'"):
        composed(a_group([a_turn(1.0)]), **{f"{THIS}.says_yes": 1.0})


@pytest.mark.parametrize("reward", [True, 1, np.float32(1), np.int64(1), np.float64(1)])
def test_every_kind_of_number_becomes_a_float(reward):
    group = a_group([a_turn(reward)])
    assert composed(group, environment=1.0) == [[1.0]]
    assert type(group.trajectories[0].turns[0].reward) is float


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ({}, "reward.components is empty"),
        ({"environment": "much"}, "environment='much' is not a weight"),
        ({"environment": math.nan}, "is not a weight"),
        ({"environment": True}, "is not a weight"),
        ({"length_penalty": 0.1}, "length_penalty does not fit its function.*max_tokens"),
        ({"length_penalty": {"max_token": 5}}, "length_penalty does not fit its function.*max_token"),
        ({"lenght_penalty": {"weight": 0.1, "max_tokens": 5}}, "is not a built-in shaping.*length_penalty"),
        ({"environment": {"weight": 1.0, "scale": 2.0}}, "has parameters"),
        ({"no.such.judge": 1.0}, "reward.components.no.such.judge=no.such.judge cannot be imported"),
        ({"judge": {"target": f"{THIS}.judge", "strict": 1}}, "judge does not fit its function.*strict"),
    ],
)
def test_wrong_components_are_refused_before_the_first_episode(components, message):
    with pytest.raises(UserError, match=message):
        RewardComposer(RewardConfig(components=components))


def test_an_unknown_level_is_refused():
    with pytest.raises(UserError, match="reward.level=token .*turn, trajectory"):
        RewardComposer(RewardConfig(level="token"))


def test_a_component_that_no_turn_reports_is_an_error_with_the_known_names():
    composer = RewardComposer(RewardConfig(components={"environment": 1.0, "fromat": 0.5}))
    composer.check()  # no turn was composed yet
    composer.apply(a_group([a_turn(1.0, format=1.0)], [a_turn(0.0)]))
    with pytest.raises(
        UserError, match=r"fromat is not known \(did you mean format\?\).*environment, format.*none of 2"
    ):
        composer.check()


def test_a_component_that_some_turns_report_is_valid():
    composer = RewardComposer(RewardConfig(components={"environment": 1.0, "bonus": 0.5}))
    composer.apply(a_group([a_turn(1.0)]))
    composer.apply(a_group([a_turn(1.0), a_turn(0.0, bonus=1.0)]))
    composer.check()
