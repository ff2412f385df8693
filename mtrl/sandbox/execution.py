"""One command in a sandbox, from start to end: its output is cut while it runs, its time and memory are monitored."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import select
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress

from mtrl.sandbox.bubblewrap import Namespace
from mtrl.sandbox.limits import ProcessLimits, ProcessResult, SandboxError
from mtrl.sandbox.seccomp import denied_system_calls

_CHUNK = 2**16
_WATCH_SECONDS = 0.1
_END_SECONDS = 30.0
"""Maximum number of seconds that a killed command may take to end; a busy machine can need many."""
_KILLED = 128 + 9
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Execution:
    """A command that has started. `wait` must be called in the same thread, because bubblewrap ends with that thread.

    Raises:
        SandboxError: the host could not start it.
    """

    def __init__(self, namespace: Namespace, command: list[str], limits: ProcessLimits, stdin: bytes | None = None):
        self.limits = limits
        self._lock = threading.Lock()
        self._killed_by: str | None = None
        self._init = -1
        """Pidfd of the first process inside the sandbox; all processes of the command end with it."""
        self._pid = 0
        self._started = time.monotonic()
        try:
            self._process, status = _start(namespace, command, limits, stdin)
        except OSError as error:
            raise SandboxError(f"the sandbox cannot start a process: {error}") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._outputs = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        self._printed = dict.fromkeys(self._outputs, 0)
        self._status = {status: bytearray()}

    def wait(self, timeout: float) -> ProcessResult:
        """Wait until the command and all its processes have ended; kill them after `timeout` seconds of wall time, or
        at a limit.

        Raises:
            SandboxError: bubblewrap failed, or the command did not end although it was killed.
        """
        try:
            self._follow(self._started + timeout)
            self._process.wait()
        finally:
            self._release()
        return self._result()

    def stop(self, reason: str) -> None:
        """Kill the command; the first reason counts. Any thread may call it."""
        with self._lock, suppress(OSError):  # the process may have ended
            self._killed_by = self._killed_by or reason
            if self._init >= 0:  # not bubblewrap: its orphan would stay a zombie if no init reaps it
                signal.pidfd_send_signal(self._init, signal.SIGKILL)
            else:
                self._process.kill()

    def _follow(self, deadline: float) -> None:
        poll = select.poll()
        pending = {*self._outputs, *self._status}
        for descriptor in pending:
            poll.register(descriptor, select.POLLIN)
        watch = self._started + _WATCH_SECONDS
        while pending:
            now = time.monotonic()
            if now > deadline + _END_SECONDS:
                self._process.kill()
                raise SandboxError("a command did not end although it was killed")
            if now > deadline or self._killed_by:
                self.stop("time")
                deadline = min(deadline, now)
            elif now > watch:
                self._watch_memory()
                watch = now + _WATCH_SECONDS
            wait = _WATCH_SECONDS if self._killed_by else max(0.0, min(watch, deadline) - now)
            for descriptor, _ in poll.poll(1000 * wait + 1):
                if not self._read(descriptor):
                    poll.unregister(descriptor)
                    pending.remove(descriptor)

    def _read(self, descriptor: int) -> bool:
        """Read the available data of one pipe; return False at its end."""
        data = os.read(descriptor, _CHUNK)
        if descriptor in self._status:
            self._status[descriptor] += data
            if self._init < 0 and b"\n" in self._status[descriptor]:
                self._pid = int(self._report().get("child-pid", 0))
                with suppress(OSError):  # it has ended
                    self._init = os.pidfd_open(self._pid)
            return bool(data)
        stored = self._outputs[descriptor]
        stored += data[: self.limits.output_bytes - len(stored)]
        self._printed[descriptor] += len(data)
        if sum(self._printed.values()) > self.limits.printed_bytes:
            self.stop("output")
        return bool(data)

    def _watch_memory(self) -> None:
        """Stop the command if it exceeds the memory limit.

        The plain sum is cheap but counts shared pages repeatedly, so the exact sum is computed only if the plain one
        exceeds the limit.
        """
        most = self.limits.memory_bytes
        tree = process_tree(self._pid) if self._pid else set()
        if sum(map(resident_memory, tree)) > most and sum(map(proportional_memory, tree)) > most:
            self.stop("memory")

    def _report(self) -> dict[str, int]:
        """Return the merged JSON lines that bubblewrap has reported so far."""
        (text,) = self._status.values()
        found: dict[str, int] = {}
        for line in bytes(text).split(b"\n"):
            with suppress(ValueError):
                found |= json.loads(line)
        return found

    def _release(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None and self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()
        with self._lock:
            for descriptor in (*self._status, self._init):
                if descriptor >= 0:
                    os.close(descriptor)
            self._init = -1

    def _result(self) -> ProcessResult:
        code = self._report().get("exit-code")
        stdout, stderr = (
            _decode(bytes(stored), self._printed[descriptor] > len(stored))
            for descriptor, stored in self._outputs.items()
        )
        if self._killed_by:
            code = _KILLED
        elif code is None:
            raise SandboxError(f"bubblewrap failed: {' '.join(stderr.split())[:300]}")
        return ProcessResult(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            truncated=any(self._printed[descriptor] > len(stored) for descriptor, stored in self._outputs.items()),
            timed_out=self._killed_by == "time",
            killed_by=self._killed_by,
            seconds=time.monotonic() - self._started,
        )


def _start(
    namespace: Namespace, command: list[str], limits: ProcessLimits, stdin: bytes | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start bubblewrap; return its process, and a descriptor from which its reports are read."""
    with ExitStack() as inherited, ExitStack() as own:
        reader, writer = os.pipe()
        own.callback(os.close, reader)
        inherited.callback(os.close, writer)
        inherited.callback(os.close, refused := _pipe_with(denied_system_calls()))
        inherited.callback(os.close, source := _file_with(stdin))
        process = subprocess.Popen(
            namespace.command_line(command, limits, writer, refused),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(writer, refused),
            env={},
            start_new_session=True,  # Ctrl-C goes to mtrl only, which then ends the command
        )
        own.pop_all()
        return process, reader


def _pipe_with(data: bytes) -> int:
    """Return a descriptor from which a small amount of data can be read; a pipe holds at least 4096 bytes."""
    reader, writer = os.pipe()
    try:
        os.write(writer, data)
    finally:
        os.close(writer)
    return reader


def _file_with(data: bytes | None) -> int:
    """Return a descriptor from which `data` can be read. It is sealed: a process that inherits it cannot write."""
    if data is None:
        return os.open(os.devnull, os.O_RDONLY)
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _decode(data: bytes, cut: bool) -> str:
    """Decode UTF-8; a character that the cut splits is left out."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=not cut)


def process_tree(pid: int) -> set[int]:
    """Return the ids of a process and of all its descendants."""
    todo, found = [pid], set[int]()
    while todo:
        parent = todo.pop()
        found.add(parent)
        with suppress(OSError):  # it has ended
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as children:
                    todo += [child for child in map(int, children.read().split()) if child not in found]
    return found


def resident_memory(pid: int) -> int:
    """Return the resident memory of one process, in bytes."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return _PAGE * int(file.read().split()[1])
    except OSError:  # it has ended
        return 0


def proportional_memory(pid: int) -> int:
    """Return the resident memory of one process in bytes, with each shared page divided by its number of processes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith(b"Pss:"))
    except OSError:  # it has ended
        return 0
