"""One HTTP exchange: the body that a client sends, the reply or the error that it gets, and whether it is still
connected.

Every wait for a client's body has a time limit. The server has the limit for a client that does not read its reply.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Any], Awaitable[None]]
T = TypeVar("T")

SECONDS_TO_SEND = 30.0
"""Maximum time for receiving the body of a request, in seconds."""
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""OpenAI's error types by HTTP status."""


class RequestError(Exception):
    """A refused request: an HTTP status, a message of one sentence, and optionally OpenAI's code and the name of the
    field at fault."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "server_error" if self.status >= 500 else _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientDisconnectedError(Exception):
    """The client disconnected before its answer."""


@dataclass
class Reply:
    """A complete response."""

    content: Any
    """Value that is sent as JSON."""
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)

    async def send(self, receive: Receive, send: Send) -> None:
        body = to_bytes(self.content)
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length, *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class CancelOnDisconnect(Generic[T]):
    """Work that runs only while its client is connected.

    async with CancelOnDisconnect(receive, session.chat(request)) as work:
        calls = await work.result()
    """

    def __init__(self, receive: Receive, work: Coroutine[Any, Any, T]):
        self._work = asyncio.ensure_future(work)
        self._disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))

    async def __aenter__(self) -> CancelOnDisconnect[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._disconnected.cancel()
        self._work.cancel()
        # The cancelled work must end before its session handles another event.
        await asyncio.wait((self._disconnected, self._work))
        if not self._work.cancelled():
            self._work.exception()
        del self._work, self._disconnected  # the exception of the work references this object: break the cycle

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds`, and return whether the work is done.

        Raises:
            ClientDisconnectedError: the client disconnected before.
        """
        await asyncio.wait((self._work, self._disconnected), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._work.done():
            return True
        if self._disconnected.done():
            raise ClientDisconnectedError
        return False

    async def result(self) -> T:
        """Wait for the result of the work; exceptions of the work pass through.

        Raises:
            ClientDisconnectedError: the client disconnected before.
        """
        await self.wait()
        return self._work.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_bytes(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> Any:
    """Read the JSON value of a body of at most `max_bytes` bytes.

    Raises:
        RequestError: 400 the body is not JSON; 408 it arrives too slowly; 413 it is too large.
        ClientDisconnectedError: the client disconnected.
    """
    body = await _read(scope, receive, max_bytes)
    try:
        return json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise RequestError(400, f"the body is not JSON ({what[:200]})") from None


async def _read(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    too_large = RequestError(413, f"the body has more than {max_bytes} bytes", "request_too_large")
    declared_length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if declared_length.isdigit() and int(declared_length[:20]) > max_bytes:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > max_bytes:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {SECONDS_TO_SEND:g} s") from None


def _finite(text: str) -> float:
    """Return a number. Python reads 1e999 as infinity, which an answer that repeats it could not express."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:50]} is too large")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
