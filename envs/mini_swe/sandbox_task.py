"""A task in mtrl's own sandbox: the repository, the agent's commands, and the verdict."""

from __future__ import annotations

import shlex
from typing import Any

from envs.mini_swe.grading import solves
from envs.mini_swe.sources import merged
from mtrl.environments.base import Resources
from mtrl.sandbox.process import ProcessLimits, ProcessSandbox

OUTPUT_BYTES = 2**20
"""Maximum output of a command to keep, in bytes; observations show far less."""


class SandboxTask:
    """One episode's repository. The sandbox is created at the first command.

    `execute` follows mini-swe-agent's `Environment` protocol, except that it returns the output of a submission
    normally: `envs.mini_swe.agent.AgentEnvironment` raises `Submitted`, as the package's own environments do.

    Args:
        truth: `files` (path -> text) and `calls`, see `envs.mini_swe.grading`.
        resources: closed at the end of the episode, which releases the sandbox.
        command_seconds: wall time limit of one command, in seconds.
        grading_seconds: wall time limit of all hidden calls together, in seconds.
    """

    def __init__(
        self, truth: dict[str, Any], resources: Resources, command_seconds: float = 30, grading_seconds: float = 30
    ):
        self.files: dict[str, str] = truth["files"]
        self.calls = truth["calls"]
        self.grading_seconds = grading_seconds
        self.limits = ProcessLimits(
            seconds=command_seconds, cpu_seconds=max(1, int(command_seconds)), output_bytes=OUTPUT_BYTES
        )
        self._resources = resources
        self._sandbox: ProcessSandbox | None = None

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run `action["command"]` with bash, in `cwd` or the folder of the repository.

        Returns:
            `output` (stdout and stderr, interleaved), `returncode` (-1 if the command was stopped) and
            `exception_info`.
        """
        place = f"cd -- {shlex.quote(cwd)} || exit 1; " if cwd else ""
        done = self._open().run(f"exec 2>&1; {place}{action.get('command', '')}")
        # Syntax errors of bash go to stderr, because they occur before the redirection.
        output = done.stdout + done.stderr
        if done.killed_by:
            problem = f"the command was stopped: it exceeded its limit of {done.killed_by}"
            return {"output": output, "returncode": -1, "exception_info": problem}
        return {"output": output, "returncode": done.exit_code, "exception_info": ""}

    def solved(self) -> tuple[bool, str]:
        """Return whether the hidden calls give the expected results on the current repository, and an empty report.

        An unchanged repository is not solved, and needs no sandbox for the verdict.
        """
        if self._sandbox is None:
            return False, ""
        try:
            files = merged(self.files, self._sandbox.snapshot())
        except OSError:  # too many files, or too large ones
            return False, ""
        if files is None or files == {path: text.encode() for path, text in self.files.items()}:
            return False, ""
        return solves(files, self.calls, self.grading_seconds), ""

    def _open(self) -> ProcessSandbox:
        if self._sandbox is None:
            sandbox = self._resources.enter_context(ProcessSandbox(self.limits))
            for path, text in self.files.items():
                sandbox.write_file(path, text)
            self._sandbox = sandbox
        return self._sandbox
