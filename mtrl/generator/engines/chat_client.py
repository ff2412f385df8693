"""Asking over OpenAI's chat API (`/v1/chat/completions`): repetitions, limits of time and size, the key, the bill.

Both who plays by an endpoint (`endpoint.py`) and who judges by one (`mtrl/rewards/judge.py`) ask through this.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import httpx

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.errors import UserError
from mtrl.generator.engines.purse import Bill, Purse, Usage, most_of
from mtrl.tracking.text import one_line

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRIED = frozenset({408, 409, 425, 429})
"""Answers below 500 that say to try again."""
EXHAUSTED = ("insufficient_quota", "billing")
"""Words of a 429 that waiting does not mend."""
FULL = ("context_length_exceeded", "maximum context length", "context length", "context window")
"""Words of a 400 about a conversation that has become too long."""
SUSPECT = 3
"""So many conversations that are refused before the first good answer are the fault of the settings, not theirs."""
UNSURE = frozenset({408, 504, 524})
"""Answers of somebody in between that waited no longer: the model may have answered, and was then billed."""
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)
"""Errors before the server had the request."""
FIRST_PAUSE = 0.5
"""Seconds before the first repetition; each further one waits twice as long, more or less by a random half."""
LONGEST_PAUSE = 60.0
LONGEST_WAIT = 300.0
"""At most so many seconds are waited when it is the server that names them."""
SHOWN = 300
"""Characters of the server's own words in an error."""
LARGEST = 2**24
"""Bytes of an answer that are read; no honest one comes near."""
MOST_TOKENS = 2**40
"""A count above this is none."""


class GarbledAnswerError(ValueError):
    """Status 200, and yet not what was asked for: it is asked for again."""


class NoAnswerError(RuntimeError):
    """No attempt brought an answer of use."""

    def __init__(self, attempts: int, problem: str, is_garbled: bool):
        """`is_garbled`: the last attempt brought an answer, but none of use."""
        super().__init__(problem)
        self.attempts, self.problem, self.is_garbled = attempts, problem, is_garbled


class StatusError(RuntimeError):
    """An answer that says that to ask again does not help."""

    def __init__(self, status: int, text: str, problem: str, attempts: int):
        """`text`: the whole answer; `problem`: status and the server's own words, in a line that is fit to be shown."""
        super().__init__(problem)
        self.status, self.text, self.problem, self.attempts = status, text, problem, attempts

    @property
    def is_full(self) -> bool:
        """Whether the conversation is too long for the model."""
        return self.status in (400, 413, 422) and any(word in self.text.casefold() for word in FULL)


@dataclass(frozen=True)
class Address:
    """Which model, and where."""

    model: str
    url: str
    """Up to and with `/v1`."""

    @property
    def completions(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"

    def __str__(self) -> str:
        return f"{self.model}@{self.url}"


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What was read, and after how many attempts."""

    value: T
    attempts: int


@dataclass
class _Link:
    """The connections of one event loop."""

    http: httpx.AsyncClient
    slots: asyncio.Semaphore


@dataclass(eq=False)
class ChatClient:
    """At most `max_concurrent` requests of an event loop are on their way at once. One that fails is repeated `retries`
    times, after a pause that doubles or the one that the server names."""

    address: Address
    config: EndpointConfig
    purse: Purse
    payer: str
    """Who it is written down for."""
    first_pause: float | None = None
    """Null: `FIRST_PAUSE`."""
    closed: UserError | None = None
    """Why nothing more is asked: whoever asks, or still waits, gets this."""
    requests: int = 0
    retries: int = 0
    """Of these requests."""
    _links: dict[asyncio.AbstractEventLoop, _Link] = field(default_factory=dict)

    async def ask(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> Answer[T]:
        """What `read` makes of the answer.

        Args:
            body: of the request.
            read: from an answer with status 200; raises `GarbledAnswerError` where it is to be asked for again.

        Raises:
            NoAnswerError: all attempts failed.
            StatusError: the server says that no repetition helps.
            BudgetSpentError: the budget does not do for another attempt.
            UserError: `closed`.
        """
        link = self._link()
        problem, is_garbled = "", False
        async with link.slots:
            for attempt in range(self.config.retries + 1):
                if self.closed is not None:
                    raise self.closed
                if attempt:
                    self.retries += 1
                pause = min(self._first_pause * 2**attempt * random.uniform(0.5, 1.5), LONGEST_PAUSE)
                is_garbled = False
                try:
                    response = await self._paid(link, body, attempt > 0)
                    if response.status_code == 200:
                        return Answer(read(response.content), attempt + 1)
                    problem = self._told(response)
                    if not _passes(response):
                        raise StatusError(response.status_code, response.text, problem, attempt + 1)
                    pause = max(pause, min(retry_after(response), LONGEST_WAIT))
                except (httpx.HTTPError, TimeoutError, httpx.InvalidURL, GarbledAnswerError) as error:
                    is_garbled = isinstance(error, GarbledAnswerError)
                    problem = self.words(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
                log.info("%s: attempt %d failed: %s", self.address.url, attempt + 1, problem)
                if attempt < self.config.retries:
                    await asyncio.sleep(pause)
        raise NoAnswerError(self.config.retries + 1, problem, is_garbled)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        link = self._links.pop(asyncio.get_running_loop(), None)
        if link is not None:
            await link.http.aclose()

    def words(self, text: str) -> str:
        """Words of a stranger, fit for a line of a terminal, and without our key should they repeat it."""
        if key := api_key(self.config):
            text = text.replace(key, "***")
        return one_line(" ".join(text.split()), SHOWN)

    # -- one request -------------------------------------------------------------------------------------------------

    async def _paid(self, link: _Link, body: Mapping[str, Any], is_repeated: bool) -> httpx.Response:
        async with self.purse.pay(self.payer, most_of(body) or Usage(), is_repeated) as bill:
            self.requests += 1
            try:
                response = await self._post(link, body)
            except UNSENT:
                bill.settle(Usage())
                raise
            _settle(bill, response)
            return response

    async def _post(self, link: _Link, body: Mapping[str, Any]) -> httpx.Response:
        """With one limit of time for the whole answer, since a server may send it one byte at a time; and one of size.

        Raises:
            GarbledAnswerError: it is larger.
        """
        async with asyncio.timeout(self.config.timeout):
            asked = link.http.stream("POST", self.address.completions, json=body, headers=self._headers())
            async with asked as response:
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > LARGEST:
                        raise GarbledAnswerError(f"the answer is larger than {LARGEST:,} bytes")
        kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content))

    def _link(self) -> _Link:
        """Connections and semaphores belong to an event loop, and a client may outlive it."""
        loop = asyncio.get_running_loop()
        if loop not in self._links:
            limits = httpx.Limits(max_connections=self.config.max_concurrent)
            http = httpx.AsyncClient(verify=_ssl_context(), timeout=self.config.timeout, limits=limits)
            self._links[loop] = _Link(http, asyncio.Semaphore(self.config.max_concurrent))
        return self._links[loop]

    def _told(self, response: httpx.Response) -> str:
        """Status and the server's own words."""
        try:
            body = response.json()
            error = body.get("error", body)
            said = error.get("message", error) if isinstance(error, dict) else error
            said = said if isinstance(said, str) else json.dumps(said)
        except (ValueError, AttributeError, RecursionError):
            said = response.text
        return self.words(f"HTTP {response.status_code} {said}".strip())

    def _headers(self) -> dict[str, str]:
        key = api_key(self.config)
        return {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def _first_pause(self) -> float:
        return FIRST_PAUSE if self.first_pause is None else self.first_pause


def api_key(config: EndpointConfig) -> str:
    """The key; empty where there is none."""
    return os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""


def check_key(config: EndpointConfig, setting: str) -> None:
    """`setting` names the key of the configuration that names the variable.

    Raises:
        UserError: what the variable holds is no key.
    """
    key = api_key(config)
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{setting}={config.api_key_env}: this variable holds no API key")


def check_bounds(body: Mapping[str, Any], purse: Purse, setting: str) -> None:
    """Refuse a budget where nobody can say how much one answer may be.

    Args:
        body: any request, as it would be sent.
        setting: the key of the configuration that adds keys to requests.

    Raises:
        UserError: there is a budget in USD or tokens, and requests have no limit of tokens.
    """
    limit = next((name for name in ("usd", "tokens") if getattr(purse.budget, name) is not None), None)
    if limit is not None and most_of(body) is None:
        raise UserError(
            f"{purse.key}.budget.{limit} cannot be kept to, because requests do not limit the tokens of an answer; "
            f"write {setting}.max_completion_tokens (or max_tokens)"
        )


def usage_of(answer: Any) -> dict[str, float]:
    """Tokens by the provider's count; a count that is missing or no number is 0."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {"cached_tokens": cached, **{k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}}
    return {name: _count(count) for name, count in counts.items()}


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, as a number or as a date; 0 where it does not say."""
    said = response.headers.get("retry-after", "")
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(said).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def is_exhausted(text: str) -> bool:
    """Whether a 429 says that the account has nothing left."""
    return any(word in text.casefold() for word in EXHAUSTED)


def _passes(response: httpx.Response) -> bool:
    """Whether to ask again may help."""
    status = response.status_code
    return status >= 500 or (status in RETRIED and not is_exhausted(response.text))


def _settle(bill: Bill, response: httpx.Response) -> None:
    """By the count in the answer, also where it is of no use otherwise. Refusals cost nothing; without a count an
    answer stays at its worst."""
    try:
        counted = usage_of(json.loads(response.content))
    except (ValueError, RecursionError):
        counted = {}
    if any(counted.values()):
        bill.settle(Usage(**{name: int(count) for name, count in counted.items()}))
    elif response.status_code != 200 and response.status_code not in UNSURE:
        bill.settle(Usage())


def _count(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MOST_TOKENS else 0.0


@functools.cache
def _ssl_context() -> Any:
    """Loading the certificates takes longer than a request."""
    return httpx.create_ssl_context()
