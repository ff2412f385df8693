"""One episode of a repository repair."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Protocol

from envs.mini_swe.backends import check_backend
from envs.mini_swe.container_task import ContainerTask
from envs.mini_swe.prompts import SUBMIT, style_of
from envs.mini_swe.sandbox_task import SandboxTask
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.environments.config_values import check_count, check_positive
from mtrl.errors import UserError
from mtrl.types import Message, Row

_OPENING = re.compile(r"^```(?:bash|mswea_bash_command)[ \t\r]*$", re.MULTILINE)


class Task(Protocol):
    """A repository in which commands run, for both backends."""

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]: ...
    def solved(self) -> tuple[bool, str]: ...


def parse_command(response: str) -> str | None:
    """Return the content of the only bash block of a response, without its thinking; None if there is not exactly one.

    A block begins with a line ```` ```bash ```` (or mini-swe-agent's ```` ```mswea_bash_command ````) and ends before
    the next line that begins with three backticks.
    """
    visible = response.rpartition("</think>")[2]
    openings = list(_OPENING.finditer(visible))
    if len(openings) != 1:
        return None
    command, closed, _ = visible[openings[0].end() :].partition("\n```")
    return (command.strip() or None) if closed else None


def is_submission(result: dict[str, Any]) -> bool:
    """Whether the command submits by mini-swe-agent's rule: the first line of its output is `SUBMIT`, and it
    succeeds."""
    lines = result["output"].lstrip().splitlines()
    return bool(lines) and lines[0].strip() == SUBMIT and result["returncode"] == 0


class MiniSweEnv(BaseEnvironment):
    """In each turn the model runs one shell command and observes its output, until it submits or the turns run out.

    Then the model's changes to source files are tested in a fresh sandbox or container: the reward is 1.0 if all hidden
    tests pass, else 0.0. A response that is not exactly one command uses up the turn, and always gets the same
    observation.
    """

    def __init__(
        self,
        max_turns: int = 20,
        backend: str = "sandbox",
        command_seconds: float = 30,
        grading_seconds: float = 30,
        observation_characters: int | None = None,
        container_memory: str = "4g",
        container_processes: int = 512,
        container_disk_mb: int | None = None,
        **config: Any,
    ):
        """
        Args:
            backend: where commands run: mtrl's own sandbox, or containers of docker or podman.
            command_seconds: wall time limit of one command, in seconds.
            grading_seconds: wall time limit of the hidden tests, in seconds. `environment.step_timeout` must allow for
                both limits.
            observation_characters: maximum number of characters of a command's output to show; the default is 10,000,
                and 300 for short rows.
            container_memory: memory limit of a container, in docker's notation.
            container_processes: maximum number of concurrent processes and threads in a container.
            container_disk_mb: maximum size of the files that a container writes, in MiB; None: no limit.
        """
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if max_turns < 1:
            raise UserError(f"generator.max_turns={max_turns} leaves no turn to act; set it to 1 or more")
        check_backend(backend)
        check_positive("command_seconds", command_seconds)
        check_positive("grading_seconds", grading_seconds)
        check_count("container_processes", container_processes)
        for key, number in (
            ("observation_characters", observation_characters),
            ("container_disk_mb", container_disk_mb),
        ):
            if number is not None:
                check_count(key, number)
        self.backend = backend
        self.seconds: dict[str, Any] = {"command_seconds": command_seconds, "grading_seconds": grading_seconds}
        self.container: dict[str, Any] = {
            "memory": container_memory,
            "processes": container_processes,
            "disk_mb": container_disk_mb,
        }
        self.characters = observation_characters
        self._task: Task | None = None
        self.style = style_of(None)

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        if self._task is not None:
            raise RuntimeError("an environment of mini_swe runs one episode; make a new environment")
        style = style_of(row)
        self.style = style if self.characters is None else replace(style, characters=self.characters)
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        if self._task is None:
            self._task = self._open(ground_truth)
        command = parse_command(response)
        result = None if command is None else self._task.execute({"command": command})
        submitted = result is not None and is_submission(result)
        if submitted or self.current_turn >= self.max_turns:
            return self._graded(self._task, result, submitted)
        left = self.max_turns - self.current_turn
        observation = self.style.complaint(left) if result is None else self.style.observation(result, left)
        return StepResult(0.0, observation, components={"resolved": 0.0}, metrics=_metrics(result, submitted))

    def _open(self, truth: dict[str, Any]) -> Task:
        if "image" in truth:
            if self.backend == "sandbox":
                raise UserError(
                    f"ground_truth.image={truth['image']} needs containers; set environment.config.backend to docker "
                    "or podman"
                )
            return ContainerTask(truth, self.resources, executable=self.backend, **self.container, **self.seconds)
        if self.backend != "sandbox":
            raise UserError(
                f"environment.config.backend={self.backend} needs rows with images, and this one has files; set it to "
                "sandbox"
            )
        return SandboxTask(truth, self.resources, **self.seconds)

    def _graded(self, task: Task, result: dict[str, Any] | None, submitted: bool) -> StepResult:
        """Return the result of the last turn. The output of the tests, if any, is for the scorer; the model never sees
        it."""
        solved, report = task.solved()
        reward = float(solved)
        return StepResult(
            reward=reward,
            observation=report or None,
            done=True,
            truncated=not submitted,
            components={"resolved": reward},
            metrics=_metrics(result, submitted),
        )


def _metrics(result: dict[str, Any] | None, submitted: bool) -> dict[str, float]:
    return {
        "malformed": float(result is None),
        "failed_commands": float(result is not None and result["returncode"] != 0),
        "submitted": float(submitted),
    }
