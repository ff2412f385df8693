"""A process of this machine that does not outlive this one, nor does anything that it has started."""

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

from mtrl.generator.engines.server import keeper

KILLING = 10.0
"""Seconds that a whole tree may take to go once it is killed."""
ANSWERING = 30.0
"""Seconds in which the keeper says that the process is started."""


class KeptProcess:
    """Starts a command at once, under its keeper (`keeper.py`)."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | int,
        name: str,
        folder: Path | None = None,
    ):
        """
        Args:
            output: file of what it says, and what its keeper says of it.
            name: what it is called in messages.
            folder: its working directory; None: this process's.
        """
        self.name = name
        self._keeper = 0  # its process id, when it has told
        self._pid: Future[int] = Future()
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # whoever stops waiting must not cancel it for others
        ours, theirs = socket.socketpair()
        with theirs:
            self._outer = subprocess.Popen(
                # A fresh interpreter without site-packages: it starts in a moment and takes few megabytes.
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), str(os.getpid()), *argv],
                pass_fds=(theirs.fileno(),),
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for this process
            )
        self._channel = ours
        threading.Thread(target=self._listen, args=(ours,), name=f"keeper of {name}", daemon=True).start()

    @property
    def running(self) -> bool:
        return not self._ended.done()

    @property
    def returncode(self) -> int | None:
        """What it ended with, negative for a signal; None while it runs."""
        return None if self.running else self._ended.result()

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            ProcessLookupError: it could not be started.
        """
        try:
            return self._pid.result(ANSWERING)
        except TimeoutError:
            raise ProcessLookupError(f"{self.name} is not started") from None

    async def wait(self) -> int:
        """Until it has ended; its return code."""
        return await asyncio.wrap_future(self._ended)

    def end(self, grace: float = 5.0) -> str:
        """See to it that it and all that it has started are gone, and say how it went. Blocks for `grace` seconds, in
        which it may end by itself, and a little longer; any thread may call it, any number of times."""
        if self.running:
            with suppress(OSError):
                self._channel.sendall(f"end {grace}\n".encode())
            for guardian in (
                self._keeper,
                self._outer.pid,
            ):  # a stopped one is killed, and the other one sees to the rest
                with suppress(TimeoutError):
                    self._ended.result(grace + KILLING)
                    break
                if guardian:  # 0: it was stopped before it said who it is
                    keeper.send(guardian, signal.SIGKILL)
                grace = 0.0
        code = self._ended.result()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _listen(self, channel: socket.socket) -> None:
        """In a thread: what the keeper tells, until it is gone."""
        code = None
        with suppress(OSError), channel.makefile() as lines:
            for line in lines:
                word, _, number = line.partition(" ")
                if word == "keeper":
                    self._keeper = int(number)
                elif word == "started":
                    self._pid.set_result(int(number))
                elif word == "ended":
                    code = int(number)
        self._outer.wait()
        channel.close()
        if not self._pid.done():
            self._pid.set_exception(ProcessLookupError(f"{self.name} could not be started"))
        self._ended.set_result(-signal.SIGKILL if code is None else code)  # with a keeper that was killed
