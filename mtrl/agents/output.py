"""The output of a program: the last bytes are stored, and the program may write without a limit."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

MAX_BYTES = 16 * 2**10
"""Number of bytes that are stored of the end of the output."""


class Output(asyncio.Protocol):
    """The reading end of a pipe. The other end, `writer`, is for the program; the caller that starts the program closes
    it in this process."""

    def __init__(self) -> None:
        self.writer = -1
        self._text = bytearray()
        self._closed = asyncio.Event()
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls) -> Output:
        output = cls()
        reader, output.writer = os.pipe()
        try:
            output._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: output, os.fdopen(reader, "rb", buffering=0)
            )
        except BaseException:  # the caller was cancelled
            output.close()
            raise
        return output

    @property
    def text(self) -> str:
        """The last `MAX_BYTES` bytes, decoded."""
        return bytes(self._text[-MAX_BYTES:]).decode("utf-8", "replace")

    async def complete(self, seconds: float) -> None:
        """Wait at most `seconds` until no process holds the other end any more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def close_writer(self) -> None:
        """Close the writing end in this process, once the program has it or did not start. Further calls do nothing."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Close both ends in this process."""
        self.close_writer()
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._text += data
        if len(self._text) > 2 * MAX_BYTES:
            del self._text[:-MAX_BYTES]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
