"""Agents of the command line, unchanged: Claude Code, Codex and Qwen Code repair the repositories of `envs/mini_swe`.

    scripts/fetch_command_line_agents.sh
    mtrl train experiment=null environment=agent name=repair \
        environment.target=examples.agents.command_line.FAMILY model=qwen3_4b generator.max_turns=20 \
        generator.agent.target=examples.agents.command_line.claude_code

Each agent speaks the API of its maker: Anthropic's messages, OpenAI's responses and OpenAI's chat completions. Its
prompts have 10,000 to 30,000 tokens, so a policy needs a long context.

The agent runs commands that the policy writes, and therefore runs in a sandbox as a whole: it sees the programs of the
host, read-only, one writable folder, and no network but a socket of the gateway (`command_line_sandbox.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs import mini_swe
from envs.mini_swe.grading import solves
from envs.mini_swe.sources import merged
from examples.agents.command_line_sandbox import CommandLineSandbox, inside
from mtrl.datasets import Splits
from mtrl.environments.agent import agent_family
from mtrl.errors import UserError
from mtrl.types import Row

GRADING_SECONDS = 30
MAX_WORKSPACE_BYTES = 2**26
MAX_SHOWN_BYTES = 2000


def agents_folder() -> Path:
    """Return the folder into which `scripts/fetch_command_line_agents.sh` installs the agents."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MTRL_COMMAND_LINE_AGENTS") or cache / "mtrl" / "command_line_agents")


def load(data: Any, seed: int, **config: Any) -> Splits:
    """Load the rows of `envs/mini_swe`, with issues in full English."""
    return mini_swe.load(data, seed, prompt="full", **config)


FAMILY = agent_family("command_line", load=load)
"""The task. It has no scorer of its own, since each agent has other tools, whose calls cannot be repeated: success is
the reward."""


async def claude_code(row: Row, client: Any) -> dict[str, Any]:
    """Run one episode of Claude Code for `generator.agent.target`."""
    options = ["--model", client.model, "--permission-mode", "bypassPermissions"]
    variables = {
        "ANTHROPIC_BASE_URL": inside(client.base_url).removesuffix("/v1"),
        "ANTHROPIC_API_KEY": client.api_key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return await repair(row, client, node_folders(), ["claude", "-p", issue(row), *options], variables)


async def codex(row: Row, client: Any) -> dict[str, Any]:
    """Run one episode of Codex for `generator.agent.target`."""
    provider = {
        "name": "mtrl",
        "base_url": inside(client.base_url),
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    settings = {f"model_providers.mtrl.{name}": value for name, value in provider.items()}
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    options = ["-c", 'model_provider="mtrl"', *words, "-m", client.model]
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]  # this sandbox is around it
    variables = {"OPENAI_API_KEY": client.api_key}
    return await repair(row, client, node_folders(), ["codex", "exec", *options, issue(row)], variables)


async def qwen_code(row: Row, client: Any) -> dict[str, Any]:
    """Run one episode of Qwen Code for `generator.agent.target`."""
    variables = {"OPENAI_BASE_URL": inside(client.base_url), "OPENAI_API_KEY": client.api_key}
    options = ["--auth-type", "openai", "--model", client.model, "--yolo"]
    return await repair(row, client, node_folders(), ["qwen", *options, "-p", issue(row)], variables)


def issue(row: Row) -> str:
    """Return the task, without the instructions about the form of commands, which each agent has of its own."""
    return row["prompt"][-1]["content"]


def node_folders() -> list[Path]:
    """Return the folders that the sandbox shows: those of the agents and of Node.js.

    Raises:
        UserError: the agents or Node.js are not installed.
    """
    programs, node = agents_folder(), shutil.which("node")
    if not (programs / "installed").exists():
        raise UserError(f"{programs} has no command-line agents; fetch them with: scripts/fetch_command_line_agents.sh")
    if node is None:
        raise UserError("node is not on the PATH; install Node.js, on Debian and Ubuntu: apt-get install nodejs")
    return [programs, Path(node).resolve().parents[1]]


async def repair(
    row: Row, client: Any, folders: Sequence[Path], command: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Run an agent on the repository of a row, and grade the repository that it leaves.

    Args:
        folders: folders that the sandbox shows; see `CommandLineSandbox`.

    Returns:
        The reward: 1.0 if the repository passes the row's hidden tests, else 0.0.

    Raises:
        RuntimeError: the agent ended with an error; the message has the end of its output.
    """
    truth = row["ground_truth"]
    async with CommandLineSandbox(folders, client.base_url, MAX_WORKSPACE_BYTES) as sandbox:
        for path, text in truth["files"].items():
            sandbox.files.write(path, text)
        if status := await sandbox.run(command, variables):
            output = sandbox.output[-MAX_SHOWN_BYTES:].decode(errors="replace")
            raise RuntimeError(f"{command[0]} ended with status {status}: {output}")
        files = merged(truth["files"], sandbox.files.snapshot())
    if files is None or files == {path: text.encode() for path, text in truth["files"].items()}:
        return {"reward": 0.0}
    # The hidden tests run on a thread, because the policy answers on this event loop.
    return {"reward": float(await asyncio.to_thread(solves, files, truth["calls"], GRADING_SECONDS))}
