"""One episode: the model runs commands in the task's container, and the task's tests judge what it leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from envs.terminal.backend import SANDBOX_CWD, Backend
from envs.terminal.task import TerminalTask, read_task
from envs.terminal.verdict import MAKE_FOLDERS, run_tests
from mtrl.environments.base import StepResult
from mtrl.environments.config_values import check_count, check_positive
from mtrl.environments.tools import ToolEnvironment, ToolError, tool
from mtrl.errors import UserError
from mtrl.sandbox.container import CommandResult, Container, ContainerError
from mtrl.types import Message, Row

TOOL_SLACK_SECONDS = 90.0
"""Additional seconds for a call of the tool after the time limit of its command."""
_PREPARE_SECONDS = 30.0


class TerminalEnv(ToolEnvironment):
    """A turn with calls of `bash` receives their output; a turn without calls ends the episode. Then, or when the turns
    run out, the tests run, and the reward is the number that they leave."""

    def __init__(
        self,
        max_turns: int = 20,
        backend: str = "sandbox",
        command_seconds: float = 60.0,
        output_characters: int = 4000,
        memory_mb: int = 2048,
        cpus: float | None = None,
        processes: int = 256,
        disk_mb: int = 10240,
        network: bool = False,
        servers: Sequence[str] = (),
        warm_containers: int = 0,
    ):
        """
        Args:
            command_seconds: wall time limit of one command, in seconds.
            output_characters: maximum number of characters of a command's output that the model sees.
            backend, memory_mb, cpus, processes, disk_mb, network, servers, warm_containers: see
                `envs.terminal.backend.Backend`.
        """
        check_positive("command_seconds", command_seconds)
        check_count("output_characters", output_characters)
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to act; set it to 1 or more")
        super().__init__(max_turns, tool_timeout=command_seconds + TOOL_SLACK_SECONDS)
        self.backend = Backend(backend, memory_mb, cpus, processes, disk_mb, network, servers, warm_containers)
        self.command_seconds, self.output_characters = command_seconds, output_characters
        self._seconds_left = float("inf")

    async def reset(self, row: Row | None = None) -> list[Message] | None:  # type: ignore[override]
        """Start the container of the row's task, on the thread of the episode, because the start may wait for others.

        Raises:
            UserError: the task cannot be read or does not fit the backend.
            ContainerError: the image cannot be built, or the container does not start.
        """
        super().reset(row)
        truth = (row or {})["ground_truth"]
        self._task = read_task(Path(truth["folder"]), truth["task"])
        self.backend.check(self._task)
        self._seconds_left = self._task.agent_seconds or float("inf")
        self._container = await self._call(partial(self._started, self._task), TIMEOUT_MAX)
        return None

    @tool
    def bash(self, command: str) -> str:
        """Run a command with bash and return its output. Every call starts a new shell in the working directory of the
        task: files remain between calls, variables do not."""
        seconds = min(self.command_seconds, self._seconds_left)
        if seconds <= 0:
            raise ToolError("the time of the task is over; answer without a call")
        begun = time.monotonic()
        done = self._container.run(command, seconds, self._task.env)
        self._seconds_left -= time.monotonic() - begun
        return observation(done, self.output_characters)

    def answer(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        """End the episode, and judge it by the tests."""
        return self._judged(StepResult(0.0, done=True))

    async def respond(self, message: Message, response: str, ground_truth: dict[str, Any]) -> StepResult:
        """See `ToolEnvironment.respond`; the tests also judge an episode that is out of turns."""
        result: StepResult = await super().respond(message, response, ground_truth)
        return await self._call(partial(self._judged, result), TIMEOUT_MAX) if result.truncated else result

    def _started(self, task: TerminalTask) -> Container:
        container = self.backend.container(task)
        self.resources.callback(container.remove)
        container.start()
        self.resources.callback(container.remove)  # removes it at once if the episode is over
        prepared = container.run(MAKE_FOLDERS, _PREPARE_SECONDS)
        if prepared.exit_code != 0:
            raise ContainerError(f"task {task.name} needs bash and coreutils in its image: {prepared.output[-300:]}")
        files = task.folder / "environment"
        if not task.needs_image and files.is_dir():
            container.copy_in(files, task.cwd or SANDBOX_CWD)
        return container

    def _judged(self, result: StepResult) -> StepResult:
        """Return the result with the reward of the tests. Their report is for the scorer; the model never sees it."""
        verdict = run_tests(self._container, self._task)
        report: Message = {"role": "user", "content": verdict.report}
        return replace(
            result,
            reward=verdict.reward,
            observation=[*(result.observation or []), report],
            components={"tests": verdict.reward},
            metrics={**result.metrics, "no_reward_file": float(not verdict.is_readable)},
        )


def observation(done: CommandResult, characters: int) -> str:
    """Return the text that the model sees of a command: its output, shortened in the middle to `characters`
    characters, and its exit code if it failed."""
    output, left_out = done.output, len(done.output) - characters
    if left_out > 0:
        half = characters // 2
        output = f"{output[:half]}\n[{left_out} characters left out]\n{output[len(output) - half :]}"
    if done.stopped:
        return f"{output}\n[the command was stopped: {done.stopped}]".lstrip()
    return f"{output}\n[exit code {done.exit_code}]".lstrip() if done.exit_code else output
