"""Messages between two processes over a pair of sockets, read and written by an event loop."""

from __future__ import annotations

import asyncio
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HEADER = struct.Struct("<Q")
"""Header of a message: the size of the pickle that follows, in bytes."""
CHUNK = 1 << 20
"""Maximum number of bytes of one read or write."""


class ChannelClosedError(ConnectionError):
    """The process at the other end has closed the channel or ended."""


class Channel:
    """One end of a channel between two processes.

    `send` never blocks: data that the other side has not read yet is buffered. Both sides must trust each other,
    because messages are pickles. File descriptors travel on a separate socket, each before the message that refers to
    it.
    """

    def __init__(self, messages: socket.socket, files: socket.socket):
        self._messages, self._files = messages, files
        messages.setblocking(False)
        self._inward, self._outward = bytearray(), bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def send(self, message: Any) -> None:
        """Send a message. If the other side has ended, do nothing: the reader of the channel notices it."""
        if self.closed:
            return
        pickled = pickle.dumps(message, protocol=5)
        self._outward += HEADER.pack(len(pickled)) + pickled
        self._write()

    def send_file(self, file: int) -> None:
        """Send the descriptor of an open file to the other side."""
        with suppress(OSError):  # the other side has ended, which the reader of the channel notices
            socket.send_fds(self._files, [b"f"], [file])

    def receive_file(self) -> int:
        """Return the next file descriptor that the other side sent; the caller owns it.

        Raises:
            ChannelClosedError: no descriptor arrived.
        """
        _, files, _, _ = socket.recv_fds(self._files, 1, 1)
        if not files:
            raise ChannelClosedError("no file arrived")
        return files[0]

    def attach(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Let the running event loop read. It calls `on_message` for each message, and `on_end` once, when the other
        side has ended."""
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._messages, self._read, on_message, on_end)
        self._write()

    def detach(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._messages)
            loop.remove_writer(self._messages)

    def wait(self, seconds: float) -> Any:
        """Wait for the next message without an event loop, and write buffered data meanwhile.

        Raises:
            ChannelClosedError: the other side has ended.
            TimeoutError: no message arrived within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (message := self._next()) is None:
            poll = select.poll()
            poll.register(self._messages, select.POLLIN | (select.POLLOUT if self._outward else 0))
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer within {seconds:g} s")
            self._write()
            if not self._fill():
                raise ChannelClosedError("the other side has ended")
        return message[0]

    def close(self) -> None:
        self.detach()
        self.closed = True
        self._messages.close()
        self._files.close()

    def _read(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        alive = self._fill()
        while not self.closed and (message := self._next()) is not None:
            on_message(message[0])
        if not alive and not self.closed:
            self.close()
            on_end()

    def _fill(self) -> bool:
        """Read the data that has arrived; return False if the other side has ended."""
        try:
            while data := self._messages.recv(CHUNK):
                self._inward += data
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _next(self) -> tuple[Any] | None:
        """Take the first complete message out of the buffer, as a tuple of one; None if there is none."""
        if len(self._inward) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._inward)[0]
        if len(self._inward) < end:
            return None
        message = pickle.loads(memoryview(self._inward)[HEADER.size : end])
        del self._inward[:end]
        return (message,)

    def _write(self) -> None:
        try:
            while self._outward:
                del self._outward[: self._messages.send(self._outward[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._outward.clear()
        if self._loop is None:
            return
        if self._outward:
            self._loop.add_writer(self._messages, self._write)
        else:
            self._loop.remove_writer(self._messages)
