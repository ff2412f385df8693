"""An answer as server-sent events.

An engine samples whole turns, so a stream delivers no text earlier. It supports programs that request a stream, and
keeps their connections alive meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrl.gateway.dialects.dialect import Dialect, Event
from mtrl.gateway.exchange import CancelOnDisconnect, Receive, RequestError, Send, to_bytes

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall

log = logging.getLogger(__name__)

SECONDS_BEFORE_STREAM = 0.05
"""Seconds to wait for an answer, or for a refusal with its own status, before the stream begins."""
SECONDS_BETWEEN_COMMENTS = 10.0
"""Seconds between two keep-alive comments."""
LINE_ENDS = [(end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"]
"""Characters that end a line for some clients (those that use `iter_lines` of httpx, or Python's `str.splitlines`),
though not in a stream of events, and their escapes in JSON. JSON escapes all others already."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass
class EventStream:
    """A reply that may begin before the answer exists."""

    dialect: Dialect
    work: Callable[[], Coroutine[Any, Any, Sequence[ModelCall]]]
    """Function that returns the coroutine of the calls."""

    async def send(self, receive: Receive, send: Send) -> None:
        """Send the events of the answer.

        Raises:
            RequestError: the call was refused before anything was sent.
            ClientDisconnectedError: the client disconnected.
        """
        async with CancelOnDisconnect(receive, self.work()) as work:
            if await work.wait(SECONDS_BEFORE_STREAM):
                await work.result()  # raises while a status can still be sent
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            async for event in self._events(work):
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": self.dialect.end})

    async def _events(self, work: CancelOnDisconnect[Sequence[ModelCall]]) -> AsyncIterator[bytes]:
        for event in self.dialect.opening():
            yield _event(event)
        while not await work.wait(SECONDS_BETWEEN_COMMENTS):
            yield b": sampling\n\n"
        try:
            calls = await work.result()
        except RequestError as error:
            yield _event(self.dialect.error(error))
            return
        except Exception:
            log.exception("a call failed")
            failure = RequestError(500, "the call failed; the log of the gateway has the reason")
            yield _event(self.dialect.error(failure))
            return
        for event in self.dialect.events(calls):
            yield _event(event)


def _event(event: Event) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    data = to_bytes(event)
    for character, escape in LINE_ENDS:
        data = data.replace(character, escape)
    return name + b"data: " + data + b"\n\n"
