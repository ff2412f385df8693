"""The built-in shapings: penalties of turns from the trajectory alone."""

import pytest

from mtrl.algorithms.registry import Registry
from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.rewards.shaping import SHAPINGS, cut_short_penalty, length_penalty, turn_penalty
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn


def an_episode(*tokens, stop_reason=StopReason.DONE):
    turns = [Turn([1], list(range(n)), [-0.1] * n, [(0, n)], FinishReason.STOP, "", {}) for n in tokens]
    return Trajectory("t", "g", 0, turns, stop_reason)


def test_length_penalty_is_zero_then_linear_then_constant():
    episode = an_episode(0, 12, 13, 15, 16, 17, 100)
    penalty = length_penalty(episode, {}, max_tokens=16, buffer_tokens=4)
    assert penalty == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]


def test_length_penalty_without_buffer_is_a_step():
    assert length_penalty(an_episode(16, 17), {}, max_tokens=16) == [0.0, -1.0]


def test_turn_penalty_counts_turns_beyond_the_free_ones():
    assert turn_penalty(an_episode(1, 1, 1), {}) == [0.0, -1.0, -1.0]
    assert turn_penalty(an_episode(1, 1, 1), {}, free_turns=2) == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("reason", "cut"),
    [
        (StopReason.DONE, False),
        (StopReason.ENV_ERROR, False),
        (StopReason.PARSE_ERROR, False),
        (StopReason.MAX_TURNS, True),
        (StopReason.TURN_TOKEN_LIMIT, True),
        (StopReason.CONTEXT_LIMIT, True),
    ],
)
def test_cut_short_penalty_is_on_the_last_turn(reason, cut):
    assert cut_short_penalty(an_episode(1, 1, stop_reason=reason), {}) == [0.0, -1.0 if cut else 0.0]


@pytest.mark.parametrize("reason", [StopReason.DONE, StopReason.MAX_TURNS])
def test_cut_short_penalty_applies_if_the_last_turn_was_truncated(reason):
    """`zero_reward_on_non_stop` of SkyRL, which maps to this shaping, reads only the finish of the last turn."""
    episode = an_episode(1, 1, stop_reason=reason)
    episode.turns[-1].finish = FinishReason.LENGTH
    assert cut_short_penalty(episode, {}) == [0.0, -1.0]


def test_cut_short_penalty_ignores_earlier_truncated_turns():
    episode = an_episode(1, 1)
    episode.turns[0].finish = FinishReason.LENGTH
    assert cut_short_penalty(episode, {}) == [0.0, 0.0]


def test_every_shaping_is_empty_without_turns():
    parameters = {"length_penalty": {"max_tokens": 4}}
    for name in SHAPINGS.names():
        assert SHAPINGS.find(name)(an_episode(), {}, **parameters.get(name, {})) == []


def test_an_unknown_shaping_is_a_user_error_with_the_names():
    with pytest.raises(UserError, match="turn_penalty"):
        SHAPINGS.find("turn_penalti")


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("length_penalty", {"max_tokens": 512, "buffer_tokens": -128}, "buffer_tokens=-128"),
        ("length_penalty", {"max_tokens": "512"}, "max_tokens='512'"),
        ("length_penalty", {"max_tokens": float("nan")}, "max_tokens=nan"),
        ("turn_penalty", {"free_turns": True}, "free_turns=True"),
    ],
)
def test_parameters_that_are_no_counts_are_refused_before_the_first_episode(name, parameters, problem):
    """With a negative buffer the penalty was a reward that grows with the length of a turn without bound."""
    with pytest.raises(UserError, match=f"reward.components.{name}.{problem} must be a number of at least 0"):
        RewardComposer(RewardConfig(components={name: {"weight": 1.0, **parameters}}))


def rewards_of(monkeypatch, function):
    """Return the rewards of an episode of two turns for a user's shaping."""
    shapings = Registry("shapings of this test", "mtrl.rewards.shaping")
    shapings.register("own")(function)
    monkeypatch.setattr("mtrl.rewards.component.SHAPINGS", shapings)
    group = Group("g", {"ground_truth": {}}, [an_episode(1, 1)])
    RewardComposer(RewardConfig(components={"own": 1.0})).apply(group)
    return group.trajectories[0].rewards


def test_a_single_number_of_a_shaping_is_the_reward_of_the_last_turn(monkeypatch):
    assert rewards_of(monkeypatch, lambda trajectory, row: 0.5) == [0.0, 0.5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda trajectory, row: [1.0], "gave 1 rewards for 2 turns .*; return one number, or one for each turn"),
        (lambda trajectory, row: row["tag"], r"failed: KeyError in test_shaping.py, line \d+: 'tag'; fix the reward"),
    ],
)
def test_a_mistake_in_a_shaping_is_one_sentence_that_names_it(function, message, monkeypatch):
    """It ended the run with a traceback."""
    with pytest.raises(UserError, match=f"^reward.components.own {message}"):
        rewards_of(monkeypatch, function)
