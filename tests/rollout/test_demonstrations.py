"""Conversations of a demonstrator with the environment, which the warm start imitates."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from mtrl.environments.base import BaseEnvironment
from mtrl.errors import UserError
from mtrl.rollout.demonstrations import demonstrate
from tests.echo import Echo, echo_family

ROW = {"id": "1", "prompt": [{"role": "user", "content": "7?"}], "ground_truth": {"digit": "7"}}


@pytest.fixture
def echo():
    """The family of `tests/echo.py`, whose counter of closed environments starts at 0."""
    Echo.closed = 0
    return echo_family()


class Scripted:
    def __init__(self, row, rng):
        self.observations = []
        Scripted.last = self

    def act(self, observation):
        self.observations.append(observation)
        return f"try {len(self.observations)}"


def run(family, environment, **row):
    return demonstrate(replace(family, demonstrate=Scripted), environment, {**ROW, **row}, random.Random(0)).messages


def test_demonstrate_runs_a_whole_episode(echo):
    messages = demonstrate(echo, echo.environment, ROW, random.Random(1)).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages[2:]] == ["no, again", "<say>7</say>"]
    assert echo.environment.closed == 1


def test_a_demonstration_ends_with_a_response_when_the_turns_run_out(echo):
    messages = run(echo, lambda: echo.environment(max_turns=3))
    assert [m["content"] for m in messages] == ["7?", "try 1", "no, again", "try 2", "no, again", "try 3"]
    assert Scripted.last.observations == [None, "no, again", "no, again"]


def test_the_opening_messages_of_reset_replace_the_prompt(echo):
    class Opening(BaseEnvironment):
        def reset(self, row):
            row["prompt"].clear()
            return [{"role": "system", "content": "S"}, {"role": "user", "content": "other"}]

        def step(self, response, truth):
            return 0.0, [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], self.max_turns == 1

    messages = run(echo, lambda: Opening(max_turns=2))
    assert [m["content"] for m in messages] == ["S", "other", "try 1", "a", "b", "try 2"]
    assert Scripted.last.observations == [None, "ab"] and ROW["prompt"], "the row is unchanged"


def test_environments_may_be_async(echo):
    class Async(BaseEnvironment):
        async def reset(self, row):
            return None

        async def step(self, response, truth):
            return 1.0, None, True

        async def close(self):
            closed.append(True)

    closed = []
    assert [m["content"] for m in run(echo, Async)] == ["7?", "try 1"] and closed == [True]


def test_the_environment_is_closed_after_an_error(echo):
    class Broken(echo.environment):
        def step(self, response, truth):
            return "nonsense"

    with pytest.raises(TypeError, match="Broken.step returned 'nonsense'"):
        run(echo, Broken)
    assert echo.environment.closed == 1


def test_a_demonstrator_without_a_further_response_is_named(echo):
    left = iter(["try 1"])
    family = replace(echo, demonstrate=lambda row, rng: SimpleNamespace(act=lambda observation: next(left)))
    with pytest.raises(
        UserError, match="^the demonstrator of row 1 has no more responses after 1 turns; repeat its last"
    ):
        demonstrate(family, echo.environment, ROW, random.Random(0))
    assert echo.environment.closed == 1


def test_an_environment_with_tools_receives_messages_and_is_truncated(echo):
    class Tools(BaseEnvironment):
        tools: ClassVar = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

        def respond(self, message, response, truth):
            received.append((message.get("tool_calls"), response))
            return 0.0, "3", False

        def truncate(self, truth):
            received.append("truncated")
            return {}

    class Caller(Scripted):
        def act(self, observation):
            return '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

    received = []
    chat = demonstrate(replace(echo, demonstrate=Caller), lambda: Tools(max_turns=2), ROW, random.Random(0))
    messages = chat.messages
    assert chat.tools == Tools.tools
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert [item[0][0]["function"]["name"] for item in received[:2]] == ["add", "add"] and received[2:] == ["truncated"]
    assert messages[1]["content"] == received[0][1]


def test_an_environment_may_run_an_event_loop_of_its_own(echo):
    class Looping(BaseEnvironment):
        def step(self, response, truth):
            return asyncio.run(asyncio.sleep(0, (1.0, None, True)))

    assert [m["content"] for m in run(echo, Looping)] == ["7?", "try 1"]
