"""The checks of the policy's own rollouts, with generated rollouts."""

from types import SimpleNamespace

import pytest

from mtrl.config.schema import Config
from mtrl.preflight.policy_checks import Baseline, groups, out_of_turns, token_cap
from mtrl.preflight.result import Status
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn

LAST = StopReason.DONE


def turn(finish=FinishReason.STOP):
    return Turn([1], [2, 3], [-0.5, -0.5], [(0, 2)], finish, "", {"role": "assistant", "content": ""})


def baseline(*episodes):
    """Return a baseline of `episodes`: finish reasons of the turns, and the stop reason."""
    played = [Trajectory("t", "g", i, [turn(f) for f in turns], stop) for i, (turns, stop) in enumerate(episodes)]
    return Baseline([Group("g", {}, played)], 4096)


def result_of(check, *episodes):
    config = Config()
    config.generator.max_turns, config.generator.sampling_params.max_generate_length = 5, 16
    return check(SimpleNamespace(config=config), baseline(*episodes))


def test_an_episode_counts_as_cut_whichever_of_its_turns_is():
    """One of 20 episodes is 5 %, though but one of their 200 turns is cut."""
    whole, cut = [FinishReason.STOP] * 10, [FinishReason.STOP] * 9 + [FinishReason.LENGTH]
    result = result_of(token_cap, (cut, LAST), *[(whole, LAST)] * 19)
    assert result.status == Status.WARN and result.evidence.startswith("5.0% of 20 episodes have a turn that reaches")
    assert result.fix == "set generator.sampling_params.max_generate_length=32"
    assert result_of(token_cap, (cut, LAST), *[(whole, LAST)] * 20).status == Status.PASS


@pytest.mark.parametrize("stop", [StopReason.MAX_TURNS, StopReason.TURN_TOKEN_LIMIT])
def test_a_tenth_without_a_final_answer_is_too_many(stop):
    result = result_of(out_of_turns, ([FinishReason.STOP], stop), *[([FinishReason.STOP], LAST)] * 9)
    assert result.status == Status.WARN and result.evidence.startswith("10.0% of 10 episodes run out of turns")
    assert result.fix == "set generator.max_turns=8, or teach the policy to answer"
    assert (
        result_of(out_of_turns, ([FinishReason.STOP], stop), *[([FinishReason.STOP], LAST)] * 10).status == Status.PASS
    )


def test_rewards_of_two_roles_are_not_compared():
    """One side always wins: each group of a side has equal rewards, though the two sides have different ones."""
    config = Config()
    config.algorithm.group_size = 4
    played = []
    for index in range(4):
        for role, won in (("first", 1.0), ("second", 0.0)):
            side = Trajectory("t", "g", index, [turn()], LAST, role=role, score=won)
            side.turns[0].reward = won
            played.append(side)
    result = groups(SimpleNamespace(config=config), Baseline([Group("g", {}, played)], 4096))
    assert result.status == Status.WARN and "success 50.0%: 0% of groups of 4 should hold both" in result.evidence
    assert "0% of 2 had different rewards" in result.evidence
