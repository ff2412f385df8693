"""A task in containers of docker or podman: one that the agent works in, and a fresh one for the hidden tests.

Not run against a real daemon by our tests: those have a program that takes its place and records what it is told.
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
"""What a command may print: then it is stopped, for all of it is held in memory here."""
LOG_CHARACTERS = 400_000
"""Of the tests' log that are kept, from its end, where the summary is."""
SLACK_SECONDS = 10
"""How long the client may take after the command itself was stopped inside."""
START_SECONDS = 1200
"""For pulling an image, and for taking the future out of its repository."""
FORGET_FUTURE = (
    "git remote | xargs -r -n1 git remote remove; git tag -l | xargs -r git tag -d; "
    "git for-each-ref --format='%(refname)' refs/heads refs/remotes refs/stash | "
    'grep -vxF "$(git symbolic-ref -q HEAD)" | xargs -r -n1 git update-ref -d; '
    "git reflog expire --expire=now --all; git gc --prune=now --quiet; true"
)
"""Images of SWE-bench may hold commits after the base, and so the solution: `git log --all` has shown it to agents."""


class ContainerTask:
    """One episode's container, started when the first command comes.

    Args:
        truth: see `envs.mini_swe.swebench`.
        resources: what removes the containers.
        executable: docker or podman.
        memory: of a container, in docker's form.
        processes: of a container at once.
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
        """As `SandboxTask.execute`."""
        return self._open().run(action.get("command", ""), self.command_seconds, cwd or self.cwd)

    def solved(self) -> tuple[bool, str]:
        """Whether the hidden tests pass on a fresh container with the agent's patch; and their exit code and log."""
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
        self._resources.callback(container.remove)  # again: if the episode is over by now, this removes it at once
        return container

    def _diff(self) -> str:
        """What the agent changed since the base commit, committed or not. The container is hostile: so is the text."""
        assert self._container is not None
        command = f"git add -A && git diff --cached --no-ext-diff --no-textconv --no-color --no-renames {self._base}"
        done = self._container.run(command, self.command_seconds, self.cwd)
        return done["output"] if done["returncode"] == 0 else ""


class Container:
    """A container started by mini-swe-agent's `DockerEnvironment`.

    Commands in it are run by us: the package collects their output without a limit, and leaves a command that took too
    long running inside.
    """

    def __init__(self, executable: str, image: str, run_args: list[str], cwd: str):
        self.executable, self.image, self.cwd = executable, image, cwd
        self.label = f"mtrl={uuid.uuid4().hex}"
        self.run_args = [*run_args, "--label", self.label]
        self._environment: Any = None

    def start(self) -> None:
        """
        Raises:
            RuntimeError: it cannot be started; the episode is void.
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
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise RuntimeError(f"{self.executable} cannot start {self.image}: {said[-1] if said else ''}") from error
        self._id = self._environment.container_id
        self._environment.container_id = None  # its own clean-up works in the background, after we have done it

    def run(self, command: str, seconds: float, cwd: str, stdin: str | None = None) -> dict[str, Any]:
        """Run a command by bash; `timeout` stops it and its group inside, and we the client if that fails."""
        inside = ["timeout", "-s", "KILL", f"{seconds:g}", "bash", "-c", command]
        client = [self.executable, "exec", *(["-i"] if stdin is not None else []), "-w", cwd]
        return run_bounded([*client, self._id, *inside], seconds, stdin)

    def write(self, path: str, text: str) -> None:
        """
        Raises:
            RuntimeError: the container does not take it.
        """
        done = self.run(f"cat > {path}", SLACK_SECONDS, self.cwd, stdin=text)
        if done["returncode"] != 0:
            raise RuntimeError(f"{self.executable} cannot write {path}: {done['output'][-200:]}")

    def remove(self) -> None:
        """Remove it, also where its start was interrupted. Doing it again does nothing."""
        find = [self.executable, "ps", "-aq", "--filter", f"label={self.label}"]
        found = subprocess.run(find, capture_output=True, text=True, timeout=60).stdout.split()
        if found:
            subprocess.run([self.executable, "rm", "-f", *found], capture_output=True, timeout=60)


def run_bounded(command: list[str], seconds: float, stdin: str | None = None) -> dict[str, Any]:
    """Run a client that runs `timeout` inside: its output up to a limit, in the form of mini-swe-agent's protocol."""
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
