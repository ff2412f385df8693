"""Claude Code, Codex and Qwen Code, unchanged, repair a repository through the gateway, each over its own API."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from examples.agents import command_line
from examples.agents.command_line import FAMILY, agents_folder
from examples.agents.command_line_sandbox import CommandLineSandbox
from mtrl.agents.callable import CallableRunner
from mtrl.agents.loop import AgentLoop
from mtrl.config.schema import DataConfig
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.tool_calls import format_call
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.episode import EpisodeLimits
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import StopReason, Trajectory
from tests.examples.agent_episodes import run

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
    pytest.mark.ci,
    pytest.mark.skipif(
        not (agents_folder() / "installed").exists(), reason="no agents; run scripts/fetch_command_line_agents.sh"
    ),
]


@pytest.fixture(scope="module")
def row():
    return FAMILY.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=1), 0).train[0]


class WatchedGateway(Gateway):
    """A gateway that stores its sessions."""

    def open(self, name, sampling):
        self.session = super().open(name, sampling)
        return self.session


def play(agent, row, responses, codec, leave_out=()):
    """The trajectory of an episode, and that of the same calls if none were left out."""
    limits = EpisodeLimits(max_turns=8, max_context_length=CONTEXT, step_timeout=60, episode_timeout=120, retries=0)
    texts = iter(responses)  # a sub-agent that runs beside the main conversation has another trajectory of the engine
    engine = ScriptedEngine(lambda name, turn: next(texts), codec.tokenizer)
    gateway = WatchedGateway(engine, codec, SessionLimits(8, 4, CONTEXT, leave_out=leave_out))
    loop = AgentLoop(gateway, CallableRunner(getattr(command_line, agent), 2), limits, max_concurrent=2)
    trajectory = asyncio.run(run(loop, row, codec))
    session = gateway.session
    session.limits = replace(session.limits, leave_out=())
    return trajectory, Trajectory("t", "g", 0, session.turns())


def shell(agent, command):
    name, argument = SHELLS[agent]
    return format_call(name, {argument: command, **OTHERS.get(name, {})})


@pytest.mark.parametrize("agent", SHELLS)
def test_an_unchanged_agent_repairs_a_repository(agent, row, tiny_codec):
    look = f"cat f.py; ls {ROOT}; id -u"
    responses = [shell(agent, look), shell(agent, "sed -i 's| \\*| +|' f.py"), "repaired"]
    trajectory, _ = play(agent, row, responses, tiny_codec)
    assert (trajectory.error, trajectory.stop_reason) == (None, StopReason.DONE)
    assert [turn.text for turn in trajectory.turns] == responses
    assert [turn.break_reason for turn in trajectory.turns] == [None] * 3
    assert trajectory.reward == 1.0
    assert command_line.issue(row) in "".join(message["content"] for message in trajectory.turns[0].observation)
    seen = trajectory.turns[1].observation[0]["content"]
    assert "def plus8" in seen and "No such file or directory" in seen and "1000" in seen
    assert all(len(turn.action_ids) == len(turn.action_logprobs) for turn in trajectory.turns)


def test_an_agent_that_repairs_nothing_has_no_reward(row, tiny_codec):
    trajectory, _ = play("codex", row, ["I cannot"], tiny_codec)
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 0.0, 1)


TASK = {"description": "find the file", "prompt": "Find the file of the function.", "subagent_type": "Explore"}


def test_a_sub_agent_can_be_left_out(row, tiny_codec):
    """Its conversation of four calls is longer than the main one, which waits for it."""
    agent = "claude_code"
    look = [shell(agent, command) for command in ("ls", "cat f.py", "wc -l f.py")]
    main = [format_call("Agent", TASK), shell(agent, "sed -i 's| \\*| +|' f.py"), "repaired"]
    trajectory, whole = play(agent, row, [main[0], *look, "it is f.py", *main[1:]], tiny_codec, ("side", "sub_agent"))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [turn.text for turn in trajectory.turns] == main and trajectory.metrics["gateway/sub_agent_calls"] == 4
    assert [turn.text for turn in whole.turns] == [main[0], *look, "it is f.py", *main[1:]]
    assert_the_rest_is_identical(trajectory, whole, samples=1)


def test_a_compaction_can_be_left_out(row, tiny_codec, monkeypatch):
    """Codex asks for a summary without its tools, and goes on with that instead of the history."""
    repair = command_line.repair

    async def with_low_limit(row, client, folders, command, variables):
        options = ["-c", "model_auto_compact_token_limit=19500"]  # a prompt without the output has 18,000 tokens
        return await repair(row, client, folders, [*command[:2], *options, *command[2:]], variables)

    monkeypatch.setattr(command_line, "repair", with_low_limit)
    main = [shell("codex", "sed -i 's| \\*| +|' f.py; seq 3000"), "repaired"]
    trajectory, whole = play("codex", row, [main[0], "f.py is repaired", main[1]], tiny_codec, ("side",))
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [turn.text for turn in trajectory.turns] == main and trajectory.metrics["gateway/side_calls"] == 1
    assert "COMPACTION" in whole.turns[1].observation[-1]["content"]
    assert "f.py is repaired" in trajectory.turns[1].observation[-1]["content"]
    assert_the_rest_is_identical(trajectory, whole, samples=2)


def assert_the_rest_is_identical(trajectory, whole, samples):
    """The samples are those of the whole trajectory without the samples of the calls that are left out."""
    kept = trajectory_samples(trajectory, [1.0] * len(trajectory.turns))
    every = trajectory_samples(whole, [1.0] * len(whole.turns))
    assert len(kept) == samples and len(every) == samples + 1
    assert sum(sum(sample.loss_mask) for sample in kept) == trajectory.action_tokens < whole.action_tokens
    pairs = [(sample.token_ids, sample.loss_mask) for sample in every]
    assert all((sample.token_ids, sample.loss_mask) in pairs for sample in kept)


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
