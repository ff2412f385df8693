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
"""Bytes of the pickle that follows."""
CHUNK = 1 << 20


class ChannelClosedError(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end. `send` never waits: what the other side does not read yet is kept. Both sides must trust each other, for
    messages are pickles. Descriptors travel on a socket of their own, each before the message that speaks of it."""

    def __init__(self, messages: socket.socket, files: socket.socket):
        self._messages, self._files = messages, files
        messages.setblocking(False)
        self._inward, self._outward = bytearray(), bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False

    def send(self, message: Any) -> None:
        """Nothing happens if the other side is gone: whoever reads hears of that."""
        if self.closed:
            return
        pickled = pickle.dumps(message, protocol=5)
        self._outward += HEADER.pack(len(pickled)) + pickled
        self._write()

    def send_file(self, file: int) -> None:
        """Let the other side have this open file."""
        with suppress(OSError):  # it is gone, and whoever reads hears of that
            socket.send_fds(self._files, [b"f"], [file])

    def receive_file(self) -> int:
        """The next file that the other side sent, which belongs to the caller."""
        _, files, _, _ = socket.recv_fds(self._files, 1, 1)
        if not files:
            raise ChannelClosedError("no file came")
        return files[0]

    def attach(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Let the running event loop read: each message goes to `on_message`; `on_end` is told once, at the end."""
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
        """The next message, without an event loop; meanwhile what is due is written.

        Raises:
            ChannelClosedError: the other side is gone.
            TimeoutError: nothing came within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (message := self._next()) is None:
            poll = select.poll()
            poll.register(self._messages, select.POLLIN | (select.POLLOUT if self._outward else 0))
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(f"no answer within {seconds:g} s")
            self._write()
            if not self._fill():
                raise ChannelClosedError("the other side is gone")
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
        """Take in what has arrived; False at the end."""
        try:
            while data := self._messages.recv(CHUNK):
                self._inward += data
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _next(self) -> tuple[Any] | None:
        """The first message that is there as a whole."""
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
