"""Hostile shell commands and code: they run isolated under bubblewrap, with one writable folder per episode.

A command sees no network, and only the programs of the host, read-only. /workspace, /tmp and /dev/shm persist between
commands; the processes of a command do not. Limits apply to all processes of a command together. The sandbox does not
protect against a bug in the Linux kernel, which host and sandbox share.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from mtrl.sandbox.bubblewrap import Namespace
from mtrl.sandbox.execution import Execution
from mtrl.sandbox.isolation import check_isolation
from mtrl.sandbox.limits import ProcessLimits, ProcessResult, SandboxError
from mtrl.sandbox.workspace import Workspace

__all__ = ["ProcessLimits", "ProcessResult", "ProcessSandbox", "SandboxError", "check_isolation"]

_LONGEST_ARGUMENT = 2**17 - 1
"""Maximum length of an argument in bytes: Linux' MAX_ARG_STRLEN minus the NUL at the end."""
_LONGEST_COMMAND = 2**20
_NOT_RUN = 126


class ProcessSandbox:
    """A private folder, and commands that run in it one after another. Any thread may use it, but one at a time.

    Example::

        with ProcessSandbox() as sandbox:
            sandbox.write_file("main.py", "print(6 * 7)")
            sandbox.run("python3 main.py > answer; cat answer").stdout      # '42\\n'
            sandbox.read_file("answer")                                     # b'42\\n'

    Args:
        folders: names of further writable folders of the root, such as `app` for /app; they share the limits of the
            workspace.

    Raises:
        UserError: this machine cannot isolate commands; the message names the cause, and how to install or permit it.
    """

    def __init__(self, limits: ProcessLimits | None = None, folders: Sequence[str] = ()):
        check_isolation()
        self.limits = limits or ProcessLimits()
        self._namespace = Namespace(self.limits, folders)
        owner = self._namespace.owner or None
        self._files = Workspace(self._namespace.folder, owner, self.limits.workspace_bytes)
        self._lock = threading.Lock()
        self._running: Execution | None = None
        self._closing = False

    def __enter__(self) -> ProcessSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, command: str | list[str], timeout: float | None = None, stdin: str | bytes | None = None
    ) -> ProcessResult:
        """Run one command in /workspace, and end all its processes.

        Args:
            command: a line for bash, or a program and its arguments.
            timeout: seconds of wall time; default: the limit.
            stdin: standard input of the command; default: empty.

        Raises:
            SandboxError: the sandbox is closed, or failed; a failure of the command raises nothing.
        """
        arguments = [command] if isinstance(command, str) else list(command)
        if problem := _problem(arguments):
            return ProcessResult(_NOT_RUN, "", f"{problem}\n")
        # `env`, because a bare name would be looked up among bash's own commands first.
        arguments = [*(("/bin/bash", "-c") if isinstance(command, str) else ("/usr/bin/env", "--")), *arguments]
        content = stdin.encode("utf-8", "replace") if isinstance(stdin, str) else stdin
        with self._lock:
            self._prepare()
            execution = self._running = Execution(self._namespace, arguments, self.limits, content)
            if self._closing:
                execution.stop("closed")
            try:
                return execution.wait(self.limits.seconds if timeout is None else timeout)
            finally:
                self._running = None

    def write_file(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        """Write a file of the workspace. See `Workspace.write`."""
        with self._lock:
            self._prepare()
            self._files.write(path, content, mode)

    def read_file(self, path: str) -> bytes:
        """Read a file of the workspace, which a hostile command may have made. See `Workspace.read`."""
        with self._lock:
            self._prepare()
            return self._files.read(path)

    def copy_in(self, source: str | Path, path: str = ".") -> None:
        """Copy a trusted file or folder of the host into the workspace. See `Workspace.copy_in`."""
        with self._lock:
            self._prepare()
            self._files.copy_in(Path(source), path)

    def snapshot(self) -> dict[str, bytes | None]:
        """Return all files of the workspace by path. See `Workspace.snapshot`."""
        with self._lock:
            self._prepare()
            return self._files.snapshot()

    def close(self) -> None:
        """Release all resources. A command that still runs in another thread is stopped first."""
        self._closing = True
        if running := self._running:
            running.stop("closed")
        with self._lock:
            self._namespace.close()

    def _prepare(self) -> None:
        if self._closing:
            raise SandboxError("the sandbox is closed")
        self._namespace.make_enterable()


def _problem(arguments: list[str]) -> str:
    """Return why the kernel cannot run a command; an empty text if it can."""
    if not arguments:
        return "the command is empty"
    if any("\0" in argument for argument in arguments):
        return "the command holds a NUL character"
    try:
        sizes = [len(argument.encode()) for argument in arguments]
    except UnicodeError:
        return "the command is not valid text"
    if max(sizes) > _LONGEST_ARGUMENT or sum(sizes) + 8 * len(sizes) > _LONGEST_COMMAND:
        return f"the command is longer than {_LONGEST_ARGUMENT} bytes"
    return ""
