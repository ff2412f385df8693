"""The sandbox of this machine as a container: the programs of the host, read-only, and folders of its own."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtrl.sandbox.container import CommandResult, ContainerError, CopyRefusedError
from mtrl.sandbox.process import ProcessLimits, ProcessSandbox, SandboxError

COPY_SECONDS = 30.0
"""Time limit for copying a folder in, in seconds."""
_SHARED = ("workspace", "tmp")
"""Names of writable folders of the root that each sandbox has."""
_SYSTEM = ("bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "opt", "proc", "sbin", "sys", "usr")
"""Names of folders of the root that are the system's."""


def may_be_cwd(path: str) -> bool:
    """Whether a path can be a working directory: a folder directly below the root, and none of the system."""
    name = path.strip("/")
    return name not in ("", ".", "..", *_SYSTEM) and "/" not in name


class BubblewrapContainer:
    """A sandbox of bubblewrap, which needs no image. Unlike in other containers, the processes of a command end with
    the command, and commands run as user 1000.

    Args:
        limits: limits of one command; `seconds` is ignored, because `run` has a limit of its own.
        cwd: working directory of the commands, which exists from the start; see `may_be_cwd`.
        folders: names of further writable folders of the root.
    """

    def __init__(self, limits: ProcessLimits, cwd: str, folders: Sequence[str] = ()):
        self.limits, self.cwd = limits, cwd
        self._folders = tuple(name for name in dict.fromkeys((cwd.strip("/"), *folders)) if name not in _SHARED)
        self._sandbox: ProcessSandbox | None = None

    def start(self) -> None:
        """See `Container.start`."""
        try:
            self._sandbox = ProcessSandbox(self.limits, self._folders)
        except SandboxError as error:
            raise ContainerError(str(error)) from error

    def run(self, command: str, seconds: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """See `Container.run`."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        return self._run(["env", "-C", self.cwd, *variables, "bash", "-c", f"exec 2>&1; {command}"], seconds)

    def copy_in(self, source: Path, target: str) -> None:
        """See `Container.copy_in`."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as packed:
            packed.add(source, arcname=".")
        done = self._run(["tar", "-x", "-o", "-C", target], COPY_SECONDS, archive.getvalue())
        if done.exit_code != 0:
            kind = ContainerError if done.stopped else CopyRefusedError  # no process of the agent delays the copy
            reason = done.stopped or done.output.strip()[-300:]
            raise kind(f"the sandbox cannot copy {source.name} to {target}: {reason}")

    def remove(self) -> None:
        """See `Container.remove`."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _run(self, command: list[str], seconds: float, stdin: bytes | None = None) -> CommandResult:
        if self._sandbox is None:
            raise ContainerError("the sandbox has not been started")
        try:
            done = self._sandbox.run(command, seconds, stdin)
        except SandboxError as error:
            raise ContainerError(str(error)) from error
        output = done.stdout + done.stderr  # bash reports syntax errors before the redirection
        if done.killed_by:
            return CommandResult(output, -1, f"it exceeded its limit of {done.killed_by}")
        return CommandResult(output, done.exit_code)
