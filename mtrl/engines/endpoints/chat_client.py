"""A client of OpenAI's chat API (`/v1/chat/completions`): retries, limits of time and size, the API key, the costs.

The engine (`engine.py`), the judge (`mtrl/rewards/judge.py`) and the customers of `envs/service` send their requests
through it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.engines.endpoints.budget import Budget, Reservation, TokenUsage, maximum_usage
from mtrl.errors import UserError
from mtrl.utils.http_client import (
    ResponseTooLargeError,
    error_message,
    exception_message,
    exponential_pause,
    is_temporary,
    printable,
    read_body,
    retry_after,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

TOO_LONG = ("context_length_exceeded", "maximum context length", "context length", "context window")
"""Words in the body of a 400, 413 or 422 about a conversation that is too long."""
MAX_REFUSED = 3
"""Number of refused conversations, before the first usable answer, from which on the settings count as the cause."""
MAYBE_CHARGED = frozenset({408, 504, 524})
"""HTTP statuses of a proxy that timed out: the model may have answered nevertheless, and the provider may charge for
the answer."""
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)
"""Errors that occur before the server has received the request."""
FIRST_PAUSE = 0.5
"""Pause before the first retry, in seconds. Each further pause is twice as long; a random factor between 0.5 and 1.5
multiplies every pause."""
LONGEST_PAUSE = 60.0
"""Maximum pause before a retry, in seconds, where the server names none."""
LONGEST_WAIT = 300.0
"""Maximum pause that a server can request, in seconds."""
LARGEST = 2**24
"""Maximum size of an answer, in bytes; ordinary answers are far smaller."""
MOST_TOKENS = 2**40
"""Maximum plausible count of tokens in an answer; a larger one is read as 0."""


class GarbledAnswerError(ValueError):
    """An answer with status 200 that is not what was requested; the client retries."""


class NoAnswerError(RuntimeError):
    """No attempt brought a usable answer."""

    def __init__(self, attempts: int, problem: str, is_garbled: bool):
        """`is_garbled`: whether the last attempt brought an answer, but an unusable one."""
        super().__init__(problem)
        self.attempts, self.problem, self.is_garbled = attempts, problem, is_garbled


class StatusError(RuntimeError):
    """An answer with an error status for which a retry is useless."""

    def __init__(self, status: int, text: str, problem: str, attempts: int):
        """`text`: the whole answer; `problem`: one printable line with the status and the server's message."""
        super().__init__(problem)
        self.status, self.text, self.problem, self.attempts = status, text, problem, attempts

    @property
    def is_full(self) -> bool:
        """Whether the conversation is too long for the model."""
        return self.status in (400, 413, 422) and any(word in self.text.casefold() for word in TOO_LONG)


@dataclass(frozen=True)
class Address:
    """A model and the URL of its endpoint."""

    model: str
    url: str
    """URL of the endpoint, up to and including `/v1`."""

    @property
    def completions(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"

    def __str__(self) -> str:
        return f"{self.model}@{self.url}"


@dataclass(frozen=True)
class ChatAnswer(Generic[T]):
    """The value that was read from an answer, and the number of attempts that it took."""

    value: T
    attempts: int


@dataclass
class _Connections:
    """The connections of one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore
    users: int = 0
    """Number of calls of `request_and_close` in progress."""


@dataclass(eq=False)
class ChatClient:
    """Sends requests to one endpoint, at most `max_concurrent` at once per event loop.

    A failed request is retried up to `retries` times. The pause before a retry doubles each time, and is at least the
    one that the server requests.
    """

    address: Address
    config: EndpointConfig
    budget: Budget
    account: str
    """Name under which the budget records the requests."""
    first_pause: float | None = None
    """Pause before the first retry, in seconds. None: `FIRST_PAUSE`."""
    largest: int = LARGEST
    """Maximum size of an answer, in bytes."""
    closed: UserError | None = None
    """Error that every new or waiting request raises; None while requests are sent."""
    requests: int = 0
    """Number of attempts that were sent."""
    retries: int = 0
    """Number of attempts beyond the first of their request."""
    _connections: dict[asyncio.AbstractEventLoop, _Connections] = field(default_factory=dict)

    async def request(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> ChatAnswer[T]:
        """Send a request and return the value that `read` makes of the answer.

        Args:
            body: body of the request.
            read: parses the body of an answer with status 200; raises `GarbledAnswerError` where the client is to
                retry.

        Raises:
            NoAnswerError: all attempts failed.
            StatusError: the status of the answer says that a retry is useless.
            BudgetSpentError: the rest of the budget is too small for another attempt.
            UserError: the client is `closed`.
        """
        connections = self._own_connections()
        problem, is_garbled = "", False
        async with connections.slots:
            for attempt in range(self.config.retries + 1):
                if self.closed is not None:
                    raise self.closed
                if attempt:
                    self.retries += 1
                pause = exponential_pause(attempt, self._first_pause, LONGEST_PAUSE)
                is_garbled = False
                try:
                    response = await self._send(connections, body, attempt > 0)
                    if response.status_code == 200:
                        return ChatAnswer(read(response.content), attempt + 1)
                    problem = self._status_line(response)
                    if not is_temporary(response.status_code, response.text):
                        raise StatusError(response.status_code, response.text, problem, attempt + 1)
                    wait = retry_after(response.headers.get("retry-after", ""))
                    pause = max(pause, min(wait, LONGEST_WAIT))
                except (httpx.HTTPError, TimeoutError, httpx.InvalidURL, GarbledAnswerError) as error:
                    is_garbled = isinstance(error, GarbledAnswerError)
                    problem = self.printable(exception_message(error))
                log.info("%s: attempt %d failed: %s", self.address.url, attempt + 1, problem)
                if attempt < self.config.retries:
                    await asyncio.sleep(pause)
        raise NoAnswerError(self.config.retries + 1, problem, is_garbled)

    async def request_and_close(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> ChatAnswer[T]:
        """Like `request`; the last call in progress on an event loop closes the connections of the loop.

        It is for callers that do not know when an event loop ends, such as rewards and environments.
        """
        connections = self._own_connections()
        connections.users += 1
        try:
            return await self.request(body, read)
        finally:
            connections.users -= 1
            if not connections.users:
                await self.close()

    async def close(self) -> None:
        """Close the connections of this event loop."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.http.aclose()

    def printable(self, text: str) -> str:
        """Return text from the server as one printable line, in which stars replace our API key."""
        return printable(text, api_key(self.config))

    # -- one request -------------------------------------------------------------------------------------------------

    async def _send(self, connections: _Connections, body: Mapping[str, Any], is_retry: bool) -> httpx.Response:
        """Send a request and return its answer; the budget reserves the maximum cost and records the actual one."""
        async with self.budget.reserve(self.account, maximum_usage(body) or TokenUsage(), is_retry) as reservation:
            self.requests += 1
            try:
                response = await self._post(connections, body)
            except UNSENT:
                reservation.settle(TokenUsage())
                raise
            _settle(reservation, response)
            return response

    async def _post(self, connections: _Connections, body: Mapping[str, Any]) -> httpx.Response:
        """Send a request and read its whole answer, with limits of time and size.

        The timeout covers the whole answer, since a server may send it one byte at a time.

        Raises:
            GarbledAnswerError: the answer is larger than `largest`.
        """
        async with asyncio.timeout(self.config.timeout):
            stream = connections.http.stream("POST", self.address.completions, json=body, headers=self._headers())
            async with stream as response:
                try:
                    content = await read_body(response.aiter_bytes(), self.largest)
                except ResponseTooLargeError as error:
                    raise GarbledAnswerError(str(error)) from None
        # Without its type the text is decoded as UTF-8. A server can name a charset whose decoder raises errors.
        headers = {key: value for key, value in response.headers.items() if key == "retry-after"}
        return httpx.Response(response.status_code, headers=headers, content=content)

    def _own_connections(self) -> _Connections:
        """Return the connections of the running event loop.

        Connections and semaphores belong to an event loop, and a client may outlive it.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            limits = httpx.Limits(max_connections=self.config.max_concurrent)
            http = httpx.AsyncClient(verify=_ssl_context(), timeout=self.config.timeout, limits=limits)
            self._connections[loop] = _Connections(http, asyncio.Semaphore(self.config.max_concurrent))
        return self._connections[loop]

    def _status_line(self, response: httpx.Response) -> str:
        """Return one line with the status and the server's message."""
        return self.printable(f"HTTP {response.status_code} {error_message(response.content)}".strip())

    def _headers(self) -> dict[str, str]:
        key = api_key(self.config)
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _first_pause(self) -> float:
        return FIRST_PAUSE if self.first_pause is None else self.first_pause


def api_key(config: EndpointConfig) -> str:
    """Return the API key; empty where none is set."""
    return os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""


def check_key(config: EndpointConfig, setting: str) -> None:
    """Check that the environment variable holds a valid API key, or none.

    Args:
        setting: configuration key that names the variable, for the error.

    Raises:
        UserError: the value of the variable cannot be an API key.
    """
    key = api_key(config)
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{setting}={config.api_key_env}: the value of this variable cannot be an API key")


def check_bounds(body: Mapping[str, Any], budget: Budget, setting: str) -> None:
    """Refuse a budget where the size of an answer has no limit.

    Args:
        body: any request, as it would be sent.
        setting: configuration key that adds keys to requests, for the error.

    Raises:
        UserError: the budget has a limit in USD or tokens, and requests do not limit the tokens of an answer.
    """
    limit = next((name for name in ("usd", "tokens") if getattr(budget.limits, name) is not None), None)
    if limit is not None and maximum_usage(body) is None:
        raise UserError(
            f"{budget.key}.budget.{limit} cannot be enforced, because requests do not limit the tokens of an answer; "
            f"write {setting}.max_completion_tokens (or max_tokens)"
        )


def usage_of(answer: Any) -> dict[str, float]:
    """Return the provider's token counts by name; a count that is missing or not a number is 0."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {"cached_tokens": cached, **{k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}}
    return {name: _count(count) for name, count in counts.items()}


def _settle(reservation: Reservation, response: httpx.Response) -> None:
    """Settle a reservation by the token count in the answer, even if the answer is unusable otherwise.

    An error status without a count costs nothing, unless it is in `MAYBE_CHARGED`. Every other answer without a count
    leaves the reservation at its upper bound.
    """
    try:
        counts = usage_of(json.loads(response.content))
    except (ValueError, RecursionError):
        counts = {}
    if any(counts.values()):
        reservation.settle(TokenUsage(**{name: int(count) for name, count in counts.items()}))
    elif response.status_code != 200 and response.status_code not in MAYBE_CHARGED:
        reservation.settle(TokenUsage())


def _count(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MOST_TOKENS else 0.0


@functools.cache
def _ssl_context() -> Any:
    """Return one SSL context for all clients, because loading the certificates takes longer than a request."""
    return httpx.create_ssl_context()
