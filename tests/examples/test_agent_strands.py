"""An agent of Strands Agents gives the tokens of the native loop."""

from examples.agents import openai_tools, strands_agent
from examples.agents.word_problems import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.types import StopReason
from tests.examples.agent_episodes import by_agent, by_environment, calculator_call, tokens


def called(row, responses, codec, **limits):
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


def test_an_agent_that_calls_for_ever_ends(row, tiny_codec):
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert len(trajectory.turns) == openai_tools.MOST_CALLS


def test_a_refused_call_ends_the_agent_at_once(row, tiny_codec):
    """Strands retries a refused call six times by default, with pauses of minutes."""
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec, calls=2)
    assert (len(trajectory.turns), trajectory.stop_reason) == (2, StopReason.MAX_TURNS)
