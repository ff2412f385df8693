"""The parts of one request that the gateway uses, whatever the API of its client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.gateway.session import Session

Event = dict[str, Any]
"""JSON value of one server-sent event. An event with a `type` of its own is sent under this name."""


class Dialect(Protocol):
    """A request that was read, and the writer of its answer."""

    end: bytes
    """Bytes after the last event of a stream."""

    @property
    def request(self) -> ChatRequest | CompletionRequest: ...

    def body(self, calls: Sequence[ModelCall]) -> dict[str, Any]:
        """Return the whole answer."""

    def opening(self) -> list[Event]:
        """Return the events that a stream begins with, before the answer exists."""

    def events(self, calls: Sequence[ModelCall]) -> Iterator[Event]:
        """Yield the events of the answer."""

    def error(self, error: RequestError) -> Event:
        """Return the event of an error after the beginning of a stream."""


class DialectType(Protocol):
    """Reads the body of a request.

    Raises:
        RequestError: 400; it names the field at fault.
    """

    def __call__(self, body: Any, model: str, session: Session) -> Dialect: ...
