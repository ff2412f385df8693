"""An agent of Pydantic AI gives the tokens of the native loop."""

import pytest

from examples.agents import openai_tools
from examples.agents.word_problems import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.environments.tool_calls import format_call
from mtrl.types import FinishReason, StopReason
from tests.examples.agent_episodes import by_agent, by_environment, calculator_call, tokens
from tests.packages import need

need("pydantic_ai", "needs pip install 'mtrl-agents[pydantic-ai]'")


def called(row, responses, codec, **limits):
    from examples.agents import pydantic_ai_agent

    return by_agent(CallableRunner(pydantic_ai_agent.run, 2), row, responses, codec, **limits)


def test_the_agent_trains_the_tokens_of_the_native_loop(row, tiny_codec):
    for responses in (FAMILY.gold(row), ["#### 1"]):
        agent = called(row, responses, tiny_codec)
        native = by_environment(FAMILY, row, responses, tiny_codec, max_turns=3)
        assert (agent.error, agent.reward) == (None, native.reward)
        assert tokens(agent) == tokens(native)
        assert FAMILY.score(agent, row) == agent.reward


@pytest.mark.parametrize(
    ("call", "observation"),
    [
        (calculator_call("1/0"), "Error: Fraction(1, 0)"),
        (calculator_call("2") * 2, "2"),
        (format_call("triple", {}), "Unknown tool name"),
        ("<tool_call>{oops</tool_call>", "Unknown tool name"),
        ('<tool_call>{"name": "calculate", "arguments": "1+2"}</tool_call>', "Unknown tool name"),
        ('<tool_call>{"name": "calculate", "arguments": {"x": 1, "x": 2}}</tool_call>', "Unknown tool name"),
    ],
)
def test_any_tool_call_is_answered_and_extended(row, tiny_codec, call, observation):
    """Pydantic AI sends arguments that are no object back inside one."""
    trajectory = called(row, [call, "#### 1"], tiny_codec)
    assert (trajectory.error, [turn.break_reason for turn in trajectory.turns]) == (None, [None, None])
    assert observation in trajectory.turns[1].observation[0]["content"]


def test_the_system_message_reaches_the_policy(full_row, tiny_codec):
    trajectory = called(full_row, ["#### 1"], tiny_codec)
    native = by_environment(FAMILY, full_row, ["#### 1"], tiny_codec, max_turns=3)
    assert (trajectory.error, tokens(trajectory)) == (None, tokens(native))


def test_an_agent_that_calls_for_ever_ends(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert len(trajectory.turns) == openai_tools.MOST_CALLS


@pytest.mark.parametrize("response", ["one " * 100, calculator_call("1+" * 100)], ids=["text", "call"])
def test_a_cut_answer_has_no_reward(row, tiny_codec, response):
    trajectory = called(row, [response] * 3, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.turns[0].finish == FinishReason.LENGTH


def test_a_refused_call_ends_the_agent_at_once(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec, calls=2)
    assert (len(trajectory.turns), trajectory.stop_reason) == (2, StopReason.MAX_TURNS)


def test_an_error_of_the_agent_fails_its_episode_alone(row, tiny_codec, monkeypatch):
    monkeypatch.setattr(openai_tools, "reward", lambda *_: 1 / 0)
    trajectory = called(row, ["#### 1"], tiny_codec)
    assert (trajectory.stop_reason, trajectory.trainable, len(trajectory.turns)) == (StopReason.ENV_ERROR, False, 1)
    monkeypatch.undo()
    assert called(row, ["#### 1"], tiny_codec).error is None
