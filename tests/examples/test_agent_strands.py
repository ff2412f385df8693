"""An agent of Strands Agents gives the tokens of the native loop."""

import pytest

from examples.agents import openai_tools
from examples.agents.word_problems import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.types import FinishReason, StopReason
from tests.examples.agent_episodes import by_agent, by_environment, calculator_call, tokens


def called(row, responses, codec, **limits):
    from examples.agents import strands_agent

    return by_agent(CallableRunner(strands_agent.run, 2), row, responses, codec, **limits)


def test_the_agent_trains_the_tokens_of_the_native_loop(row, tiny_codec):
    for responses in (FAMILY.gold(row), ["#### 1"]):
        agent = called(row, responses, tiny_codec)
        native = by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
        assert (agent.error, agent.reward) == (None, native.reward)
        assert tokens(agent) == tokens(native)
        assert FAMILY.score(agent, row) == agent.reward


def test_an_invalid_expression_is_an_error_observation(row, tiny_codec):
    trajectory = called(row, [calculator_call("1/0"), "#### 1"], tiny_codec)
    assert trajectory.turns[1].observation[0]["content"].startswith("Error: ")
    assert [turn.break_reason for turn in trajectory.turns] == [None, None]


def test_the_system_message_reaches_the_policy(full_row, tiny_codec):
    trajectory = called(full_row, ["#### 1"], tiny_codec)
    native = by_environment(FAMILY, full_row, ["#### 1"], tiny_codec, max_turns=3)
    assert (trajectory.error, tokens(trajectory)) == (None, tokens(native))


def test_an_agent_that_calls_for_ever_ends(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert len(trajectory.turns) == openai_tools.MOST_CALLS


def test_a_malformed_call_begins_a_new_sample(row, tiny_codec):
    """Strands sends such a call back as a text of its own."""
    trajectory = called(row, ["<tool_call>{oops</tool_call>", "#### 1"], tiny_codec)
    assert (trajectory.error, [turn.break_reason for turn in trajectory.turns]) == (None, [None, "edited"])
    assert trajectory.turns[1].observation[-1] == {"role": "assistant", "content": "[blank text]"}


@pytest.mark.parametrize("response", ["one " * 100, calculator_call("1+" * 100)], ids=["text", "call"])
def test_a_cut_answer_has_no_reward(row, tiny_codec, response):
    trajectory = called(row, [response] * 3, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.turns[0].finish == FinishReason.LENGTH


def test_a_refused_call_ends_the_agent_at_once(row, tiny_codec):
    """Strands retries a refused call six times by default, with pauses of minutes."""
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec, calls=2)
    assert (len(trajectory.turns), trajectory.stop_reason) == (2, StopReason.MAX_TURNS)
