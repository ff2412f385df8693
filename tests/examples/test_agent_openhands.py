"""The agent of the OpenHands SDK, unchanged, repairs a repository through the gateway."""

import asyncio
import os

import pytest

from examples.agents import openhands_agent
from examples.agents.command_line import FAMILY
from mtrl.agents.callable import CallableRunner
from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call
from mtrl.errors import UserError
from tests.examples.agent_episodes import by_agent

CONTEXT = 200_000
SED = r"pwd; id -u; sed -i 's| \*| +|' f.py"
"""Repairs the first row."""

real = pytest.mark.skipif(
    not os.environ.get(openhands_agent.VARIABLE), reason=f"no OpenHands SDK: {openhands_agent.INSTALL}"
)


@pytest.fixture(scope="module")
def row():
    return FAMILY.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=1), 0).train[0]


def called(row, responses, codec):
    return by_agent(CallableRunner(openhands_agent.run, 2), row, responses, codec, context=CONTEXT)


@pytest.mark.slow
@real
def test_the_unchanged_agent_repairs_a_repository(row, tiny_codec):
    responses = [
        format_call("terminal", {"command": SED}),
        format_call("file_editor", {"command": "view", "path": "/workspace/f.py"}),
        format_call("finish", {"message": "repaired"}),
    ]
    trajectory = called(row, responses, tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [turn.text for turn in trajectory.turns] == responses
    assert [turn.break_reason for turn in trajectory.turns] == [None] * 3
    ran, viewed = (turn.observation[0]["content"] for turn in trajectory.turns[1:])
    assert ran.startswith("/workspace\n1000\n") and "def plus8" in viewed


@pytest.mark.slow
@real
def test_a_malformed_call_is_answered_and_a_text_ends_the_agent(row, tiny_codec):
    """OpenHands replaces malformed arguments, so that the next call continues the call before them."""
    look = format_call("terminal", {"command": "ls"})
    trajectory = called(row, [look, "<tool_call>{oops</tool_call>", "I cannot"], tiny_codec)
    assert (trajectory.error, trajectory.reward) == (None, 0.0)
    assert [turn.break_reason for turn in trajectory.turns] == [None, None, "branch"]


def test_a_missing_interpreter_is_one_sentence(row, monkeypatch, tmp_path):
    monkeypatch.delenv(openhands_agent.VARIABLE, raising=False)
    with pytest.raises(UserError, match="^MTRL_OPENHANDS_PYTHON is not set; .*pip install 'openhands-sdk"):
        asyncio.run(openhands_agent.run(row, None))
    monkeypatch.setenv(openhands_agent.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(UserError, match="^MTRL_OPENHANDS_PYTHON=.*/python is no program; .*pip install 'openhands-sdk"):
        asyncio.run(openhands_agent.run(row, None))
