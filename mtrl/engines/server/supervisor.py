"""The supervisor of a server: small processes between the trainer and the server, which end all processes that the
server has started, even if the trainer or the server is killed.

    python -I -S supervisor.py CHANNEL PARENT COMMAND...

The supervisor is the server's parent and the subreaper of all its descendants (`man 2 PR_SET_CHILD_SUBREAPER`), so
that no descendant escapes by another session, another process group or a second fork. CHANNEL is the file descriptor
of a socket. The supervisor sends `supervisor PID`, `started PID` and `ended CODE` (negative: a signal) on it. It
receives `end SECONDS`; the end of file means that the trainer, the process PARENT, has ended. Above the supervisor a
second supervisor waits for the first and then kills the remaining processes, so that one of the two does the work if
the other is killed. This file imports only the standard library, because it is run by its path.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHAN_GRACE = 2.0
"""Seconds that a server has to end by itself after the trainer has ended."""
CANNOT_START = 127
"""Exit status of shells for a command that cannot be run."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that make the supervisor end the server."""


@dataclass(frozen=True)
class Process:
    """A process, as /proc lists it."""

    pid: int
    parent: int
    session: int
    is_zombie: bool


def processes() -> list[Process]:
    """Return all processes of this machine."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # the process has ended meanwhile
            # The process name, in parentheses, may contain spaces and parentheses.
            fields = Path(entry.path, "stat").read_bytes().rpartition(b")")[2].split()
            found.append(Process(int(entry.name), int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X")))
    return found


def below(roots: Iterable[int], among: Iterable[Process]) -> set[int]:
    """Return the process ids of all descendants of `roots`."""
    children: dict[int, list[int]] = {}
    for process in among:
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        new = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
        found.update(new)
        todo += new
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended or belong to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class Supervisor:
    """Starts the server, and waits until the server or the trainer ends, or a message or signal requests the end."""

    def __init__(self, channel: socket.socket, parent: int):
        self.channel = channel
        self.code: int | None = None
        """Exit code of the server's main process; None while it runs."""
        self.server = 0
        """Process id of the server's main process; 0 before its start."""
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._watch(parent)
        self._signals = self._catch_signals()

    def run(self, command: list[str]) -> int:
        """Run the server from start to end, and return its exit code."""
        try:
            self._process = start(command, signal.SIGKILL)
        except OSError as error:
            print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            return CANNOT_START
        self.server = self._process.pid
        self.report(f"started {self.server}")
        self._wait()
        self.code = kill_all_below(self.server, self.code)
        assert self.code is not None
        return self.code

    def report(self, line: str) -> None:
        with suppress(OSError):  # the trainer has ended
            self.channel.sendall(f"{line}\n".encode())

    def _wait(self) -> None:
        """Wait until the server has ended, or until its time to end by itself is over."""
        deadline = math.inf
        while self.code is None and (left := deadline - time.monotonic()) > 0:
            # One millisecond is added, because a rounded-down timeout would poll without waiting at the end.
            for number, _ in self._poll.poll(None if math.isinf(left) else int(left * 1000) + 1):
                if (grace := self._requested_grace(number)) is not None:
                    if math.isinf(deadline):
                        send(self.server, signal.SIGTERM)
                        send(self.server, signal.SIGCONT)
                    deadline = min(deadline, time.monotonic() + grace)
            self._reap()

    def _requested_grace(self, number: int) -> float | None:
        """Return the seconds that the server has to end itself if this file descriptor requests its end, else None."""
        if number == self._signals:
            return ORPHAN_GRACE if set(os.read(number, 4096)) & set(STOP_SIGNALS) else None
        if number == self.channel.fileno():
            with suppress(OSError, ValueError, IndexError):
                return max(0.0, float(self.channel.recv(4096).split()[1]))  # end SECONDS
        self._poll.unregister(number)  # the channel's end of file, or the trainer has ended
        return ORPHAN_GRACE

    def _reap(self) -> None:
        """Reap processes that have ended, and record the exit code of the server."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.server:
                    self.code = os.waitstatus_to_exitcode(ended[1])

    def _watch(self, parent: int) -> None:
        """Watch the trainer's process: its end is noticed even if a process that it forked still holds the channel."""
        with suppress(OSError):  # it has ended, which the channel reports too, or the kernel is older than 5.3
            self._poll.register(os.pidfd_open(parent), select.POLLIN)

    def _catch_signals(self) -> int:
        """Catch signals, and return a file descriptor from which their numbers can be read."""
        out, into = os.pipe()
        os.set_blocking(into, False)
        os.set_blocking(out, False)
        signal.set_wakeup_fd(into, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *STOP_SIGNALS):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._poll.register(out, select.POLLIN)
        return out


def start(command: list[str], death_signal: signal.Signals, *inherited: int) -> subprocess.Popen[bytes]:
    """Start a command in its own session. It receives the signal `death_signal` if this process dies.

    Raises:
        OSError: the command cannot be started.
    """
    supervisor = os.getpid()

    def die_with_supervisor() -> None:
        prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != supervisor:
            os._exit(CANNOT_START)

    return subprocess.Popen(  # the command inherits standard input, as it does standard output
        command,
        start_new_session=True,
        pass_fds=inherited,
        preexec_fn=die_with_supervisor,  # safe, because this process has one thread
    )


def kill_all_below(server: int = 0, code: int | None = None) -> int | None:
    """Kill every descendant, and return the exit code of `server` if it is among them, else `code`.

    A process that loses its parent becomes a child of this process, and is found in the next pass.
    """
    with suppress(ChildProcessError):  # no child is left
        while True:
            for pid in below([os.getpid()], processes()):
                send(pid, signal.SIGKILL)
            pid, status = os.waitpid(-1, 0)
            code = os.waitstatus_to_exitcode(status) if pid == server else code
    return code


def prctl(option: int, value: int) -> None:
    LIBC.prctl(option, ctypes.c_ulong(value))


def run_inner(channel: int, parent: int, command: list[str]) -> None:
    """Run this process as the supervisor."""
    supervisor = Supervisor(socket.socket(fileno=channel), parent)
    supervisor.report(f"supervisor {os.getpid()}")
    supervisor.report(f"ended {supervisor.run(command)}")


def run_outer(channel: int, parent: int, command: list[str]) -> None:
    """Run this process as the second supervisor, which starts the first."""
    words = [sys.executable, "-I", "-S", __file__, "--inner", str(channel), str(parent), *command]
    supervisor = start(words, signal.SIGTERM, channel)
    os.close(channel)  # so that the trainer reads the end of file when the supervisor has ended
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: send(supervisor.pid, signal.Signals(number)))
    while os.waitpid(-1, 0)[0] != supervisor.pid:
        pass
    kill_all_below()


def main(*words: str) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if words[0] == "--inner":
        run_inner(int(words[1]), int(words[2]), list(words[3:]))
    else:
        run_outer(int(words[0]), int(words[1]), list(words[2:]))


if __name__ == "__main__":
    main(*sys.argv[1:])
