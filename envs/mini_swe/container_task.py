"""A task in containers of docker or podman: one for the agent's commands, and a fresh one for the hidden tests.

The tests of this module do not use a real daemon: a program replaces it and records its arguments.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import uuid
from contextlib import suppress
from typing import Any

from envs.mini_swe.container_grading import evaluation_script, resolved
from envs.mini_swe.package import mini_swe_agent
from envs.mini_swe.patches import source_patch
from mtrl.environments.base import Resources

OUTPUT_BYTES = 2**20
"""Maximum output of a command, in bytes. A command with more output is stopped, because the whole output is held in
memory."""
LOG_CHARACTERS = 400_000
"""Maximum length of the tests' log, in characters. The end of the log is stored, because it holds the summary."""
SLACK_SECONDS = 10
"""Additional seconds for the client after the time limit of the command inside the container."""
START_SECONDS = 1200
"""Time limit for pulling an image, and for removing future commits from its repository, in seconds."""
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
    """

    def __init__(
        self,
        truth: dict[str, Any],
        resources: Resources,
        executable: str = "docker",
        memory: str = "4g",
        processes: int = 512,
        command_seconds: float = 180,
        grading_seconds: float = 3600,
    ):
        self.truth = truth
        self.cwd = truth["cwd"]
        self.command_seconds, self.grading_seconds = command_seconds, grading_seconds
        self._resources, self._executable = resources, executable
        self._run_args = ["--rm", "--network", "none", "--memory", memory, "--pids-limit", str(processes)]
        self._run_args += ["--security-opt", "no-new-privileges"]
        self._container: Container | None = None
        self._base = truth["base_commit"]

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        """Run a command; see `SandboxTask.execute`."""
        return self._open().run(action.get("command", ""), self.command_seconds, cwd or self.cwd)

    def solved(self) -> tuple[bool, str]:
        """Return whether the hidden tests pass in a fresh container with the agent's patch, and their exit code and
        log."""
        patch = source_patch(self._diff()) if self._container else ""
        if not patch:
            return False, "graded ; exit -1\nno source file was changed"
        fresh = self._start()
        try:
            fresh.write("/tmp/agent.patch", patch)
            applied = fresh.run("git apply --whitespace=nowarn /tmp/agent.patch", self.command_seconds, self.cwd)
            if applied["returncode"] != 0:
                return False, "graded ; exit -1\nthe patch does not apply"
            fresh.write("/tmp/evaluate.sh", evaluation_script(self.truth))
            done = fresh.run("bash /tmp/evaluate.sh", self.grading_seconds, self.cwd)
        finally:
            fresh.remove()
        log = done["output"][-LOG_CHARACTERS:]
        return resolved(log, done["returncode"], self.truth), f"graded ; exit {done['returncode']}\n{log}"

    def _open(self) -> Container:
        if self._container is None:
            self._container = self._start()
            self._container.run(FORGET_FUTURE, START_SECONDS, self.cwd)
            if not self._base:
                found = self._container.run("git rev-parse HEAD", self.command_seconds, self.cwd)["output"].strip()
                self._base = found if re.fullmatch("[0-9a-f]{40,64}", found) else "HEAD"
        return self._container

    def _start(self) -> Container:
        container = Container(self._executable, self.truth["image"], self._run_args, self.cwd)
        self._resources.callback(container.remove)
        container.start()
        self._resources.callback(container.remove)  # removes it at once if the episode is over
        return container

    def _diff(self) -> str:
        """Return the agent's changes since the base commit, committed or not. The container is untrusted, and so is
        this text."""
        assert self._container is not None
        command = f"git add -A && git diff --cached --no-ext-diff --no-textconv --no-color --no-renames {self._base}"
        done = self._container.run(command, self.command_seconds, self.cwd)
        return done["output"] if done["returncode"] == 0 else ""


class Container:
    """A container that mini-swe-agent's `DockerEnvironment` starts.

    This class runs the commands itself, because the package collects their output without a limit, and does not stop a
    command in the container after a timeout.
    """

    def __init__(self, executable: str, image: str, run_args: list[str], cwd: str):
        self.executable, self.image, self.cwd = executable, image, cwd
        self.label = f"mtrl={uuid.uuid4().hex}"
        self.run_args = [*run_args, "--label", self.label]
        self._environment: Any = None

    def start(self) -> None:
        """Start the container.

        Raises:
            RuntimeError: the container cannot be started, which fails the episode.
        """
        docker = mini_swe_agent("environments.docker").DockerEnvironment
        try:
            self._environment = docker(
                image=self.image,
                cwd=self.cwd,
                executable=self.executable,
                run_args=self.run_args,
                pull_timeout=START_SECONDS,
            )
        except (OSError, subprocess.SubprocessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise RuntimeError(f"{self.executable} cannot start {self.image}: {lines[-1] if lines else ''}") from error
        self._id = self._environment.container_id
        self._environment.container_id = None  # prevents its own clean-up, which would run in the background

    def run(self, command: str, seconds: float, cwd: str, stdin: str | None = None) -> dict[str, Any]:
        """Run a command with bash. `timeout` stops the command and its process group inside the container; if that
        fails, the client is killed."""
        inside = ["timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        client = [self.executable, "exec", *(["-i"] if stdin is not None else []), "-w", cwd]
        return run_bounded([*client, self._id, *inside], seconds, stdin)

    def write(self, path: str, text: str) -> None:
        """Write a file in the container.

        Raises:
            RuntimeError: the file cannot be written.
        """
        done = self.run(f"cat > {path}", SLACK_SECONDS, self.cwd, stdin=text)
        if done["returncode"] != 0:
            raise RuntimeError(f"{self.executable} cannot write {path}: {done['output'][-200:]}")

    def remove(self) -> None:
        """Remove the container, even if its start was interrupted. A second call has no effect."""
        find = [self.executable, "ps", "-aq", "--filter", f"label={self.label}"]
        found = subprocess.run(find, capture_output=True, text=True, timeout=60).stdout.split()
        if found:
            subprocess.run([self.executable, "rm", "-f", *found], capture_output=True, timeout=60)


def run_bounded(command: list[str], seconds: float, stdin: str | None = None) -> dict[str, Any]:
    """Run a client whose command uses `timeout`, and return its bounded output in the form of mini-swe-agent's
    protocol."""
    source = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    late = threading.Timer(seconds + SLACK_SECONDS, _kill, [process])
    late.start()
    try:
        if process.stdin is not None and stdin is not None:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin.encode("utf-8", "replace"))
        assert process.stdout is not None
        printed = process.stdout.read(OUTPUT_BYTES + 1)
        if len(printed) > OUTPUT_BYTES:
            _kill(process)
        process.wait()
    finally:
        late.cancel()
        _kill(process)
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    output, problem = printed[:OUTPUT_BYTES].decode("utf-8", "replace"), ""
    if len(printed) > OUTPUT_BYTES:
        problem = f"the command was stopped: it printed more than {OUTPUT_BYTES} bytes"
    elif process.returncode in (128 + signal.SIGKILL, -signal.SIGKILL):
        problem = f"the command was stopped: it took more than {seconds:g} s, or too much memory"
    return {"output": output, "returncode": -1 if problem else process.returncode, "exception_info": problem}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
