"""HTTP/1.1 protocol of mtrl's servers: uvicorn's protocol with time limits for clients that stall."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_FOR_HEADERS = 30.0
"""Time limit for a client to send the request line and the headers, in seconds, counted from the start of the
connection or from the first byte of a later request."""
SECONDS_TO_READ = 60.0
"""Time limit for a client to resume reading, in seconds, counted from when the server's write buffer is full."""
READ_BYTES = 16 << 10
"""Maximum number of bytes that are read from a socket at once. With asyncio's 256 KiB, a body in chunks of one byte
would keep the parser busy for a second at a time, while all other clients wait."""


class PatientProtocol(H11Protocol):
    """Uvicorn's protocol with time limits for clients that stall.

    A connection is closed if its client does not finish the headers of a request in time, or does not read the
    response; uvicorn waits for both without a limit. Connections that still wait for their headers may be at most half
    of the connections that the server allows. Beyond that, the longest-waiting one is closed, so that incomplete
    requests do not lock out other clients."""

    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.max_size = READ_BYTES
        self._header_timer = self.loop.call_later(SECONDS_FOR_HEADERS, transport.abort)
        self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        expects_headers = self.cycle is None or self.cycle.response_complete
        if not expects_headers:
            self._stop_waiting()
        elif self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(SECONDS_FOR_HEADERS, self.transport.abort)
            self._make_room()

    def send_400_response(self, msg: str) -> None:
        """Send status 400, or only close the connection where a response has already been sent: invalid bytes can also
        follow a response, and h11 allows no second one."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(SECONDS_TO_READ, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _make_room(self) -> None:
        most = max(1, (self.config.limit_concurrency or sys.maxsize) // 2)
        if len(self.connections) <= most:
            return
        waiting = [each for each in self.connections if isinstance(each, PatientProtocol) and each._header_timer]
        if len(waiting) > most:
            oldest = min(waiting, key=lambda each: each._header_timer.when() if each._header_timer else 0.0)
            oldest._stop_waiting()
            oldest.transport.abort()
