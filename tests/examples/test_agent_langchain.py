"""An agent of LangChain gives the tokens of the native loop."""

import pytest

from examples.agents.word_problems import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.types import FinishReason
from tests.examples.agent_episodes import by_agent, by_environment, calculator_call, tokens


def called(row, responses, codec):
    from examples.agents import langchain_agent

    return by_agent(CallableRunner(langchain_agent.run, 2), row, responses, codec)


def test_the_agent_trains_the_tokens_of_the_native_loop(row, tiny_codec):
    for responses in (FAMILY.gold(row), ["#### 1"]):
        agent = called(row, responses, tiny_codec)
        native = by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
        assert (agent.error, agent.reward) == (None, native.reward)
        assert tokens(agent) == tokens(native)
        assert FAMILY.score(agent, row) == agent.reward


@pytest.mark.parametrize("call", ["<tool_call>{oops</tool_call>", "<tool_call>[1]</tool_call>"])
def test_a_malformed_call_has_no_reward(row, tiny_codec, call):
    """LangChain ends the agent, for arguments that are no object by an error of its own."""
    trajectory = called(row, [call], tiny_codec)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 0.0, 1)


def test_the_system_message_reaches_the_policy(full_row, tiny_codec):
    trajectory = called(full_row, ["#### 1"], tiny_codec)
    native = by_environment(FAMILY, full_row, ["#### 1"], tiny_codec, max_turns=3)
    assert (trajectory.error, tokens(trajectory)) == (None, tokens(native))


@pytest.mark.parametrize("response", ["one " * 100, calculator_call("1+" * 100)], ids=["text", "call"])
def test_a_cut_answer_has_no_reward(row, tiny_codec, response):
    trajectory = called(row, [response] * 3, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.turns[0].finish == FinishReason.LENGTH


def test_an_agent_that_calls_for_ever_ends(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert 2 <= len(trajectory.turns) <= 4
