"""A server of an engine as a process of this machine, which does not outlive the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mtrl.generator.engines.server import keeper
from mtrl.generator.engines.server.backend import Command
from mtrl.generator.engines.server.environment import secrets_of, server_environment
from mtrl.generator.engines.server.words import is_port_taken, last_words

KILLING = 10.0
"""Seconds that a whole tree may take to go once it is killed."""
ANSWERING = 30.0
"""Seconds in which the keeper says that the server is started."""
TAIL = 2**18
"""Bytes at the end of a log that are read."""


class ServerProcess:
    """Starts the server at once, under its keeper (`keeper.py`) and in a scrubbed environment."""

    def __init__(self, command: Command, log: Path, name: str):
        """
        Args:
            log: its output is appended here; only its owner may read it.
            name: what it is called in messages.

        Raises:
            OSError: the log cannot be written.
        """
        self.name, self.log = name, log
        environment = server_environment(command)
        self._secrets = secrets_of(environment)
        self._keeper = 0  # its process id, when it has told
        self._pid: Future[int] = Future()
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # whoever stops waiting must not cancel it for others
        ours, theirs = socket.socketpair()
        with theirs, open_log(log) as output:
            self._start = output.tell()
            self._outer = subprocess.Popen(
                # A fresh interpreter without site-packages: it starts in a moment and takes few megabytes.
                [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), str(os.getpid()), *command.argv],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer
            )
        self._channel = ours
        threading.Thread(target=self._listen, args=(ours,), name=f"keeper of {name}", daemon=True).start()

    @property
    def running(self) -> bool:
        return not self._ended.done()

    @property
    def returncode(self) -> int | None:
        """What the server ended with, negative for a signal; None while it runs."""
        return None if self.running else self._ended.result()

    @property
    def pid(self) -> int:
        """Process id of the server.

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

    def last_words(self) -> str:
        """One line: why it died, as well as its log tells; empty where it has said nothing."""
        text = self._said()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return last_words(text)

    @property
    def lost_port(self) -> bool:
        """Whether it says that another process has its port: it may be started again with another one."""
        return is_port_taken(self._said())

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

    def _said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode("utf-8", "replace")

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


def open_log(path: Path) -> BinaryIO:
    """Append to it; nobody else reads what a server says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(number, 0o600)
    file = os.fdopen(number, "ab")
    file.seek(0, os.SEEK_END)
    return file


def free_port() -> int:
    """A port of this machine that nobody listens at now. Another process may take it before the server does, which
    `ServerProcess.lost_port` tells."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
