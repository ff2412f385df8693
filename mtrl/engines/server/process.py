"""A server of an engine as a process of this machine, which ends when the trainer ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import BinaryIO

from mtrl.engines.server.backend import ServerCommand
from mtrl.engines.server.environment import secrets_of, server_environment
from mtrl.engines.server.log_errors import error_line, is_port_taken
from mtrl.engines.server.supervised_process import SupervisedProcess
from mtrl.utils.text import redacted

TAIL = 2**18
"""Maximum number of bytes that are read from the end of a log."""


class ServerProcess(SupervisedProcess):
    """A server process under a supervisor and in an environment without secrets; the constructor starts it."""

    def __init__(self, command: ServerCommand, log: Path, name: str):
        """
        Args:
            log: file to which the server's output is appended; only its owner may read it.
            name: name of the server in messages.

        Raises:
            OSError: the log cannot be written.
        """
        self.log = log
        environment = server_environment(command)
        self._secrets = secrets_of(environment)
        with open_log(log) as output:
            self._start = output.tell()
            super().__init__(command.argv, environment, output, name)

    def error_line(self) -> str:
        """Return one line of the log that best explains why the server died; empty where the log is empty."""
        return error_line(redacted(self._output(), self._secrets))

    @property
    def lost_port(self) -> bool:
        """Whether the log says that another process has the server's port, so that a restart with another port may
        succeed."""
        return is_port_taken(self._output())

    def _output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode("utf-8", "replace")


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending; only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(number, 0o600)
    file = os.fdopen(number, "ab")
    file.seek(0, os.SEEK_END)
    return file


def free_port() -> int:
    """Return a free port of this machine. Another process may take it before the server does, which
    `ServerProcess.lost_port` reports."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
