"""An MCP server that is a process: messages on its standard input and output, one JSON object per line.

The transport of the SDK has no limit for the length of a line, and a server that it started survives the SIGKILL of
its client. This transport has a limit, and it starts the server under a supervisor.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrl.engines.server.supervised_process import SupervisedProcess

LONGEST_LINE = 4 * 2**20
"""Maximum length of a message of the server, in bytes."""
SHOWN_BYTES = 1000
"""Number of bytes of the end of standard error that a message shows."""
SECONDS_TO_EXIT = 1.0
"""Seconds that a server has to end by itself after SIGTERM."""
SECONDS_FOR_OUTPUT = 2.0
"""Maximum number of seconds for reading the remaining standard error of a server that has ended."""
PASSED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Names of the environment variables of this process that a server gets."""


class StdioServer:
    """The transport of one server, as `mcp.Client` takes it: entering it starts the process, exiting it ends the tree
    of the process."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]):
        """
        Args:
            command: program and arguments.
            env: environment variables of the server in addition to those of `PASSED`.
        """
        self.command, self.env = list(command), dict(env)
        self.problem = ""
        """Why the server can answer no more; empty while it can."""
        self._errors = b""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> tuple[Any, Any]:
        import anyio

        ours, theirs = socket.socketpair()
        errors, into = os.pipe()
        environment = {name: os.environ[name] for name in PASSED if name in os.environ} | self.env
        with theirs, open(into, "wb") as errors_writer:
            name = Path(self.command[0]).name
            self._process = SupervisedProcess(
                self.command, environment, theirs.fileno(), name, stdin=theirs.fileno(), errors=errors_writer
            )
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        received, incoming = anyio.create_memory_object_stream[Any](0)
        outgoing, sent = anyio.create_memory_object_stream[Any](0)
        log = asyncio.create_task(self._log(errors))
        self._tasks = [
            log,
            asyncio.create_task(self._receive(reader, received, log)),
            asyncio.create_task(self._send(sent)),
        ]
        return incoming, outgoing

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.close()
        # The thread of this event loop serves one server, so that blocking it delays no other.
        self._process.end(SECONDS_TO_EXIT)

    async def _receive(self, reader: asyncio.StreamReader, into: Any, log: asyncio.Task[None]) -> None:
        """Pass the messages of the server on, until it ends or breaks the protocol."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp.types import jsonrpc_message_adapter

        line = b""
        async with into:  # closed only after `problem` is set: closing it ends the calls that wait
            try:
                while True:
                    line = await reader.readuntil(b"\n")
                    await into.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
            except asyncio.LimitOverrunError:
                self.problem = f"wrote a line of more than {LONGEST_LINE} bytes to its standard output"
            except ValueError:
                self.problem = f"wrote a line that is no message of the protocol to its standard output: {line[:80]!r}"
            except (asyncio.IncompleteReadError, OSError):
                self.problem = await self._end(log)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                pass  # the client is closing

    async def _end(self, log: asyncio.Task[None]) -> str:
        """Return a phrase about how the server ended, with the end of its standard error."""
        await asyncio.wait({log}, timeout=SECONDS_FOR_OUTPUT)
        how = self._process.end(SECONDS_TO_EXIT)
        text = " ".join(self._errors.decode(errors="replace").split())
        return f"{how}; the end of its standard error: {text or '(empty)'}"

    async def _send(self, messages: Any) -> None:
        with suppress(OSError):  # the server has ended, which `_receive` reports
            async for message in messages:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._writer.write(line.encode() + b"\n")
                await self._writer.drain()

    async def _log(self, errors: int) -> None:
        """Read the standard error of the server, and keep its end."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(errors, "rb")  # the transport closes it
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while chunk := await reader.read(2**16):
                self._errors = (self._errors + chunk)[-SHOWN_BYTES:]
        finally:
            transport.close()
