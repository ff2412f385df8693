"""tinker's `MessageEnv` in the episode loop: on a copy of its interface, and on the package where it is installed."""

import json
from typing import ClassVar

import pytest
import tinker_copy
from foreign import observed, of_both, real

from mtrl.environments.adapters import adapt
from mtrl.errors import UserError
from mtrl.types import StopReason

framework = of_both(tinker_copy, "tinker_cookbook.rl.message_env", "tinker")


@pytest.fixture
def doubler(framework):
    """Answers with the response twice; it stores all messages in one list, like the environments of tinker."""

    class Doubler(framework.MessageEnv):
        made: ClassVar[list] = []

        def __init__(self, question, answer, rounds=3):
            self.question, self.answer, self.rounds, self.closed = question, answer, rounds, 0
            self.history, self.received = [], []
            Doubler.made.append(self)

        async def initial_observation(self):
            self.history.append({"role": "user", "content": self.question})
            return self.history

        async def step(self, message):
            self.received.append(message)
            self.history += [{**message, "content": message["content"].strip()}]
            done = len(self.received) == self.rounds
            if not done:
                self.history += [{"role": "user", "content": message["content"] * 2}]
            reward = 1.0 if self.answer in message["content"] else -0.5
            return framework.MessageStepResult(
                reward=reward, episode_done=done, next_messages=self.history, metrics={"right": reward > 0}
            )

        def close(self):
            self.closed += 1

    return Doubler


@pytest.fixture
def question(row):
    return {**row, "question": "2 * 21?"}


def test_only_new_messages_are_the_observation(play, doubler, question):
    trajectory = play(adapt(doubler), ["a", " b", "42"], question)
    assert trajectory.error is None
    assert observed(trajectory) == [["2 * 21?"], ["aa"], [" b b"], []]
    assert trajectory.rewards == [-0.5, -0.5, 1.0]
    assert [turn.metrics["right"] for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert trajectory.stop_reason == StopReason.DONE
    (env,) = doubler.made
    assert env.received[1] == {"role": "assistant", "content": " b"} and env.closed == 1
    assert [turn.break_reason for turn in trajectory.turns] == [None, None, None]


def test_the_config_and_the_row_make_the_environment(play, doubler, question):
    trajectory = play(adapt(doubler), ["a"], question, rounds=1, answer="a")
    assert (trajectory.error, trajectory.rewards) == (None, [1.0])
    with pytest.raises(UserError, match="environment.config.round is not an argument of Doubler"):
        adapt(doubler)(round=1)


def test_a_column_that_is_missing_is_named(play, doubler, row):
    trajectory = play(adapt(doubler), ["a"], row)
    assert "missing 1 required positional argument: 'question'" in trajectory.error


def test_a_last_step_may_leave_the_conversation_out(play, framework, row):
    class Once(framework.MessageEnv):
        async def initial_observation(self):
            return [{"role": "user", "content": "go"}]

        async def step(self, message):
            return framework.MessageStepResult(1.0, True, [])

    trajectory = play(adapt(Once), ["x"], row)
    assert (trajectory.error, trajectory.rewards) == (None, [1.0])


def test_a_conversation_that_was_rewritten_is_refused(play, framework, row):
    class Rewriter(framework.MessageEnv):
        async def initial_observation(self):
            return [{"role": "user", "content": "go"}]

        async def step(self, message):
            return framework.MessageStepResult(0.0, False, [{"role": "user", "content": "summary"}])

    trajectory = play(adapt(Rewriter), ["x"], row)
    assert trajectory.stop_reason == StopReason.ENV_ERROR
    assert "Rewriter.step returned a conversation that does not go on from the last one" in trajectory.error


def test_tinkers_own_tool_environment_gets_its_calls(play, row):
    """`AgentToolMessageEnv` of the package: a call, an answer of the tool, a final answer, and the grader."""
    real("tinker_cookbook.rl.message_env", "tinker")
    from tinker_cookbook.tool_use import simple_tool_result, tool
    from tinker_cookbook.tool_use.agent_tool_message_env import AgentToolMessageEnv

    @tool
    async def double(n: int):
        """Twice a number."""
        return simple_tool_result(str(2 * n))

    async def graded(history):
        return float(history[-1]["content"] == "42"), {"graded": 1.0}

    def make(prompt) -> AgentToolMessageEnv:
        return AgentToolMessageEnv(tools=[double], initial_messages=prompt, max_turns=5, reward_fn=graded)

    make.__annotations__["return"] = AgentToolMessageEnv
    call = "<tool_call>" + json.dumps({"name": "double", "arguments": {"n": 21}}) + "</tool_call>"
    trajectory = play(adapt(make), [call, "42"], row)
    assert trajectory.error is None
    assert observed(trajectory) == [["Q"], ["42"], []]
    assert trajectory.turns[1].observation[0]["role"] == "tool"
    assert trajectory.rewards == [0.0, 1.0] and trajectory.turns[-1].metrics["graded"] == 1.0
