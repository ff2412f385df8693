"""A process of this machine that ends, with all processes that it has started, when this process ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

from mtrl.engines.server import supervisor

KILL_TIMEOUT = 10.0
"""Maximum time, in seconds, that a killed process tree takes to end."""
START_TIMEOUT = 30.0
"""Timeout, in seconds, for the supervisor's message that the process has started."""


class SupervisedProcess:
    """A command that runs under a supervisor (`supervisor.py`); the constructor starts it."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        name: str,
        folder: Path | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        errors: IO[bytes] | int = subprocess.STDOUT,
    ):
        """
        Args:
            output: file for the output of the process and of its supervisor.
            name: name of the process in messages.
            folder: working directory; None: that of this process.
            stdin: file that the process reads as its standard input; by default it is empty.
            errors: file for the standard error of the process and of its supervisor; by default it is `output`.
        """
        self.name = name
        self._supervisor = 0  # process id of the supervisor; 0 before its first message
        self._pid: Future[int] = Future()
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the future of others
        ours, theirs = socket.socketpair()
        with theirs:
            self._outer = subprocess.Popen(
                # A fresh interpreter without site-packages starts fast and takes few megabytes.
                [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno()), str(os.getpid()), *argv],
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                cwd=folder,
                stdin=stdin,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in a terminal should reach only this process
            )
        self._channel = ours
        threading.Thread(target=self._listen, args=(ours,), name=f"supervisor of {name}", daemon=True).start()

    @property
    def running(self) -> bool:
        return not self._ended.done()

    @property
    def returncode(self) -> int | None:
        """Exit code of the process, negative for a signal; None while it runs."""
        return None if self.running else self._ended.result()

    @property
    def pid(self) -> int:
        """Process id; waits for the start.

        Raises:
            ProcessLookupError: the process could not be started.
        """
        try:
            return self._pid.result(START_TIMEOUT)
        except TimeoutError:
            raise ProcessLookupError(f"{self.name} is not started") from None

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return await asyncio.wrap_future(self._ended)

    def end(self, grace: float = 5.0) -> str:
        """Make sure that the process and all that it has started have ended, and return a phrase about how it ended.

        The call blocks for up to `grace` seconds, in which the process may end by itself, and a little longer. Any
        thread may call it, any number of times.
        """
        if self.running:
            with suppress(OSError):
                self._channel.sendall(f"end {grace}\n".encode())
            # 0: the supervisor has not sent its process id
            guardians = [pid for pid in (self._supervisor, self._outer.pid) if pid]
            for guardian in guardians:  # the process may have stopped both, and only they can end all its descendants
                supervisor.send(guardian, signal.SIGCONT)
            for guardian in guardians:  # one that does not react is killed, and the other one ends the rest
                with suppress(TimeoutError):
                    self._ended.result(grace + KILL_TIMEOUT)
                    break
                supervisor.send(guardian, signal.SIGKILL)
                grace = 0.0
        code = self._ended.result()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _listen(self, channel: socket.socket) -> None:
        """Read the supervisor's messages until it has ended; runs in a thread."""
        code = None
        with suppress(OSError), channel.makefile() as lines:
            for line in lines:
                word, _, number = line.partition(" ")
                if word == "supervisor":
                    self._supervisor = int(number)
                elif word == "started":
                    self._pid.set_result(int(number))
                elif word == "ended":
                    code = int(number)
        self._outer.wait()
        channel.close()
        if not self._pid.done():
            self._pid.set_exception(ProcessLookupError(f"{self.name} could not be started"))
        self._ended.set_result(-signal.SIGKILL if code is None else code)  # None: the supervisor was killed
