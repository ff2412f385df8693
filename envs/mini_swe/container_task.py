"""A task in containers of docker or podman: one for the agent's commands, and a fresh one for the hidden tests.

In most tests of this module a program replaces the engine and records its arguments.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from envs.mini_swe.container_grading import evaluation_script, resolved
from envs.mini_swe.patches import source_patch
from mtrl.environments.base import Resources
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.engine_container import START_SECONDS, EngineContainer

LOG_CHARACTERS = 400_000
"""Maximum length of the tests' log, in characters. The end of the log is stored, because it holds the summary."""
LIFETIME_SECONDS = 7200
"""Maximum number of seconds of an episode's commands, after which the container ends by itself."""
FORGET_FUTURE = (
    "git remote | xargs -r -n1 git remote remove; git tag -l | xargs -r git tag -d; "
    "git for-each-ref --format='%(refname)' refs/heads refs/remotes refs/stash | "
    'grep -vxF "$(git symbolic-ref -q HEAD)" | xargs -r -n1 git update-ref -d; '
    "git reflog expire --expire=now --all; git gc --prune=now --quiet; true"
)
"""Command that removes all commits after the base. Images of SWE-bench may hold such commits, including the solution,
which agents have found with `git log --all`."""


class ContainerTask:
    """One episode's container, which starts at the first command.

    Args:
        truth: see `envs.mini_swe.swebench`.
        resources: closed at the end of the episode, which removes the containers.
        executable: docker or podman.
        memory: memory limit of a container, in docker's notation.
        processes: maximum number of concurrent processes in a container.
        disk_mb: maximum size of the files that a container writes, in MiB; None: no limit.
    """

    def __init__(
        self,
        truth: dict[str, Any],
        resources: Resources,
        executable: str = "docker",
        memory: str = "4g",
        processes: int = 512,
        disk_mb: int | None = None,
        command_seconds: float = 180,
        grading_seconds: float = 3600,
    ):
        self.truth = truth
        self.cwd = truth["cwd"]
        self.command_seconds, self.grading_seconds = command_seconds, grading_seconds
        self._resources, self._executable = resources, executable
        self._limits = ContainerLimits(
            memory=memory, processes=processes, disk_mb=disk_mb, seconds=LIFETIME_SECONDS + grading_seconds
        )
        self._container: EngineContainer | None = None
        self._base = truth["base_commit"]

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command; see `SandboxTask.execute`."""
        place = f"cd -- {shlex.quote(cwd)} || exit 1; " if cwd else ""
        done = self._open().run(f"{place}{action.get('command', '')}", self.command_seconds)
        problem = f"the command was stopped: {done.stopped}" if done.stopped else ""
        return {"output": done.output, "returncode": done.exit_code, "exception_info": problem}

    def solved(self) -> tuple[bool, str]:
        """Return whether the hidden tests pass in a fresh container with the agent's patch, and their exit code and
        log."""
        patch = source_patch(self._diff()) if self._container else ""
        if not patch:
            return False, "graded ; exit -1\nno source file was changed"
        fresh = self._start()
        try:
            fresh.write("/tmp/agent.patch", patch)
            applied = fresh.run("git apply --whitespace=nowarn /tmp/agent.patch", self.command_seconds)
            if applied.exit_code != 0:
                return False, "graded ; exit -1\nthe patch does not apply"
            fresh.write("/tmp/evaluate.sh", evaluation_script(self.truth))
            done = fresh.run("bash /tmp/evaluate.sh", self.grading_seconds)
        finally:
            fresh.remove()
        log = done.output[-LOG_CHARACTERS:]
        return resolved(log, done.exit_code, self.truth), f"graded ; exit {done.exit_code}\n{log}"

    def _open(self) -> EngineContainer:
        if self._container is None:
            self._container = self._start()
            self._container.run(FORGET_FUTURE, START_SECONDS)
            if not self._base:
                found = self._container.run("git rev-parse HEAD", self.command_seconds).output.strip()
                self._base = found if re.fullmatch("[0-9a-f]{40,64}", found) else "HEAD"
        return self._container

    def _start(self) -> EngineContainer:
        container = EngineContainer(self._executable, self.truth["image"], self._limits, self.cwd)
        self._resources.callback(container.remove)
        container.start()
        self._resources.callback(container.remove)  # removes it at once if the episode is over
        return container

    def _diff(self) -> str:
        """Return the agent's changes since the base commit, committed or not. The container is untrusted, and so is
        this text."""
        assert self._container is not None
        command = f"git add -A && git diff --cached --no-ext-diff --no-textconv --no-color --no-renames {self._base}"
        done = self._container.run(command, self.command_seconds)
        return done.output if done.exit_code == 0 else ""
