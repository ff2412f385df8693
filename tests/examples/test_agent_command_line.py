"""Claude Code, Codex and Qwen Code, unchanged, repair a repository through the gateway, each over its own API."""

import asyncio
import socket
from pathlib import Path

import pytest

from examples.agents import command_line
from examples.agents.command_line import FAMILY, agents_folder
from examples.agents.command_line_sandbox import CommandLineSandbox
from mtrl.agents.callable import CallableRunner
from mtrl.agents.loop import AgentLoop
from mtrl.config.schema import DataConfig
from mtrl.environments.tool_calls import format_call
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.episode import EpisodeLimits
from mtrl.types import StopReason
from tests.examples.agent_episodes import engine_of, run

SHELLS = {
    "claude_code": ("Bash", "command"),
    "codex": ("exec_command", "cmd"),
    "qwen_code": ("run_shell_command", "command"),
}
"""Name of the tool that runs a command, and of its argument."""
OTHERS = {"Bash": {"description": "repair"}, "run_shell_command": {"description": "repair", "is_background": False}}
CONTEXT = 200_000
ROOT = Path(__file__).parents[2]
"""Folder of the project, which the sandbox must not show."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (agents_folder() / "installed").exists(), reason="no agents; run scripts/fetch_command_line_agents.sh"
    ),
]


@pytest.fixture(scope="module")
def row():
    return FAMILY.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=1), 0).train[0]


def play(agent, row, responses, codec):
    limits = EpisodeLimits(max_turns=8, max_context_length=CONTEXT, step_timeout=60, episode_timeout=120, retries=0)
    gateway = Gateway(engine_of(responses, codec), codec, SessionLimits(8, 4, CONTEXT))
    loop = AgentLoop(gateway, CallableRunner(getattr(command_line, agent), 2), limits, max_concurrent=2)
    return asyncio.run(run(loop, row, codec))


def shell(agent, command):
    name, argument = SHELLS[agent]
    return format_call(name, {argument: command, **OTHERS.get(name, {})})


@pytest.mark.parametrize("agent", SHELLS)
def test_an_unchanged_agent_repairs_a_repository(agent, row, tiny_codec):
    look = f"cat f.py; ls {ROOT}; id -u"
    responses = [shell(agent, look), shell(agent, "sed -i 's| \\*| +|' f.py"), "repaired"]
    trajectory = play(agent, row, responses, tiny_codec)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.DONE)
    assert [turn.text for turn in trajectory.turns] == responses
    assert [turn.break_reason for turn in trajectory.turns] == [None] * 3
    assert trajectory.reward == 1.0
    assert command_line.issue(row) in "".join(message["content"] for message in trajectory.turns[0].observation)
    seen = trajectory.turns[1].observation[0]["content"]
    assert "def plus8" in seen and "No such file or directory" in seen and "1000" in seen
    assert all(len(turn.action_ids) == len(turn.action_logprobs) for turn in trajectory.turns)


def test_an_agent_that_repairs_nothing_has_no_reward(row, tiny_codec):
    trajectory = play("codex", row, ["I cannot"], tiny_codec)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 0.0, 1)


def test_the_sandbox_has_no_network(tmp_path):
    """A program inside cannot reach a server of the host that answers outside."""

    async def refused(port):
        async with CommandLineSandbox([tmp_path], "http://127.0.0.1:9/v1", 2**20) as sandbox:
            program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
            status = await sandbox.run(["python3", "-c", program], {})
            return status, sandbox.output, sandbox.files.snapshot()

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        socket.create_connection(address, 2).close()
        status, output, files = asyncio.run(refused(address[1]))
    assert status == 1 and b"Connection refused" in output and files == {}
