"""An agent of smolagents: its steps, plans and final answers are trained as they were sampled."""

import pytest

pytest.importorskip("smolagents", reason="needs pip install 'mtrl-agents[smolagents]'")

from examples.agents import openai_tools, smolagents_agent
from mtrl.agents.callable import CallableRunner
from mtrl.environments.tool_calls import format_call
from mtrl.types import FinishReason, StopReason
from tests.examples.agent_episodes import by_agent, calculator_call

CONTEXT = 20_000
"""Tokens of a context: smolagents' own system prompt has 2,900 tokens for the tiny policy."""


def called(row, responses, codec, function=smolagents_agent.run, **limits):
    return by_agent(CallableRunner(function, 2), row, responses, codec, context=CONTEXT, **limits)


def answer(row):
    return f"#### {row['ground_truth']['answer']}"


def breaks(trajectory):
    return [turn.break_reason for turn in trajectory.turns]


def counts(trajectory):
    """Return the numbers of calls beside the main conversation: side calls, and calls of sub-agents."""
    return [trajectory.metrics[f"gateway/{kind}_calls"] for kind in ("side", "sub_agent")]


@pytest.mark.parametrize(("final", "reward"), [(None, 1.0), ("#### 1", 0.0)])
def test_the_final_answer_is_a_call_and_decides_the_reward(row, tiny_codec, final, reward):
    """smolagents writes earlier calls into its prompt as text, so that each step begins a new sample."""
    final = format_call("final_answer", {"answer": final or answer(row)})
    trajectory = called(row, [calculator_call("1+2"), final], tiny_codec)
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, StopReason.DONE, reward)
    assert breaks(trajectory) == [None, "edited"]
    assert trajectory.turns[1].observation[-1]["content"] == "Observation:\n3"
    assert counts(trajectory) == [0, 0]


def test_the_system_message_reaches_the_policy(full_row, tiny_codec):
    final = format_call("final_answer", {"answer": answer(full_row)})
    trajectory = called(full_row, [final], tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert full_row["prompt"][0]["content"] in trajectory.turns[0].observation[0]["content"]


def test_an_answer_as_text_is_an_error_that_extends_the_tokens(row, tiny_codec):
    final = format_call("final_answer", {"answer": answer(row)})
    trajectory = called(row, [answer(row), final], tiny_codec)
    assert (trajectory.error, trajectory.reward, breaks(trajectory)) == (None, 1.0, [None, None])


@pytest.mark.parametrize(
    "call",
    [
        calculator_call("1/0"),
        format_call("triple", {}),
        "<tool_call>{oops</tool_call>",
        "<tool_call>[1]</tool_call>",
    ],
)
def test_after_its_last_step_the_agent_asks_once_more(row, tiny_codec, call):
    """The final answer is requested without tools, and is another conversation."""
    trajectory = called(row, [call, call, answer(row)], tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert "Error" in trajectory.turns[1].observation[-1]["content"]
    assert (breaks(trajectory), counts(trajectory)) == ([None, "fresh", "fresh"], [2, 0])


def test_plans_are_side_calls(row, tiny_codec):
    def planned(row, client):
        return smolagents_agent.solve(row, client, planning_interval=1)

    final = format_call("final_answer", {"answer": answer(row)})
    trajectory = called(row, ["a plan", calculator_call("1+2"), "another plan", final], tiny_codec, planned)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert (breaks(trajectory), counts(trajectory)) == ([None, "fresh", "edited", "edited"], [2, 0])


@pytest.mark.parametrize("response", ["one " * 100, calculator_call("1+" * 100)], ids=["text", "call"])
def test_a_cut_answer_has_no_reward(row, tiny_codec, response):
    trajectory = called(row, [response] * 3, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert trajectory.turns[0].finish == FinishReason.LENGTH


def test_a_refused_call_ends_the_agent_at_once(row, tiny_codec):
    """smolagents repeats a refused call by default, after a minute."""
    trajectory = called(row, [calculator_call("1+2")] * 9, tiny_codec, calls=1)
    assert (len(trajectory.turns), trajectory.stop_reason) == (1, StopReason.MAX_TURNS)


def test_an_error_of_the_agent_fails_its_episode_alone(row, tiny_codec, monkeypatch):
    monkeypatch.setattr(openai_tools, "reward", lambda *_: 1 / 0)
    final = format_call("final_answer", {"answer": answer(row)})
    trajectory = called(row, [final], tiny_codec)
    assert (trajectory.stop_reason, trajectory.trainable, len(trajectory.turns)) == (StopReason.ENV_ERROR, False, 1)
    monkeypatch.undo()
    assert called(row, [final], tiny_codec).error is None
