"""A server of an engine as a process of this machine, which does not outlive the trainer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import BinaryIO

from mtrl.generator.engines.server.backend import Command
from mtrl.generator.engines.server.environment import secrets_of, server_environment
from mtrl.generator.engines.server.kept_process import KeptProcess
from mtrl.generator.engines.server.words import is_port_taken, last_words

TAIL = 2**18
"""Bytes at the end of a log that are read."""


class ServerProcess(KeptProcess):
    """Starts the server at once, under its keeper and in a scrubbed environment."""

    def __init__(self, command: Command, log: Path, name: str):
        """
        Args:
            log: its output is appended here; only its owner may read it.
            name: what it is called in messages.

        Raises:
            OSError: the log cannot be written.
        """
        self.log = log
        environment = server_environment(command)
        self._secrets = secrets_of(environment)
        with open_log(log) as output:
            self._start = output.tell()
            super().__init__(command.argv, environment, output, name)

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

    def _said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self._start, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode("utf-8", "replace")


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
