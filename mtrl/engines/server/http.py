"""A client for JSON over HTTP to one server of an engine. Answers are not trusted: their time and size are limited."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from mtrl.engines.server.api import ServerBusyError, ServerError, ServerGoneError, ServerRefusedError
from mtrl.errors import UserError
from mtrl.utils.text import one_line

REPEATABLE = frozenset({408, 409, 425, 429})
"""HTTP statuses between 400 and 499 that ask the client to try again."""
BUSY = frozenset({429, 503})
"""HTTP statuses of an overloaded server."""
LARGEST = 2**26
"""Maximum size of an answer, in bytes; a turn of 100,000 tokens with their log-probs takes a tenth of it."""
IDLE = 2.0
"""Seconds for which an idle connection stays open. Servers keep connections open for longer (uvicorn: 5), so that no
request is sent on a connection that the server is closing."""
SHOWN = 300
"""Maximum number of characters of the server's own words in an error."""
WORDS = ("error", "message", "detail", "error_message", "msg")
"""Keys under which servers put the text of an error in a JSON object; the first with a value is used."""


class Http:
    """A client that reaches `url` without a proxy, on as many connections as there are concurrent requests.

    It may be used from several event loops one after another; each gets a new `httpx` client.
    """

    def __init__(self, url: str, token: str | None):
        """`token` is sent with every request, and removed from errors.

        Raises:
            UserError: a header cannot hold the token.
        """
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            raise UserError(f"the token for the server {url} is no token: it must be printable ASCII without spaces")
        self.url, self._token = url.rstrip("/"), token
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(
        self, method: str, path: str, body: Any = None, *, seconds: float, params: Mapping[str, Any] | None = None
    ) -> Any:
        """Send a request and return the parsed JSON of the answer, or None where the answer is empty or not JSON.

        Args:
            body: body of the request, sent as JSON; None: no body.
            seconds: timeout for the whole answer, in seconds.
            params: parameters of the query.

        Raises:
            ServerGoneError: no answer in time, or the connection failed.
            ServerRefusedError: a status between 300 and 499 that does not ask for a retry.
            ServerBusyError: status 429 or 503.
            ServerError: another status that asks for a retry, a status of 500 or above, or an answer that is too large
                or broken.
        """
        asked = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(seconds):
                response, content = await self._send(method, path, body, params, asked)
        except TimeoutError:
            raise ServerGoneError(f"{asked}: no answer within {seconds:g} s") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerRefusedError(f"{asked}: {self._words(str(error))}") from None
        except (httpx.HTTPError, OSError) as error:
            words = self._words(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            raise ServerGoneError(f"{asked}: {words}") from None
        if not response.is_success:
            is_repeatable = response.status_code >= 500 or response.status_code in REPEATABLE
            kind = ServerError if is_repeatable else ServerRefusedError
            kind = ServerBusyError if response.status_code in BUSY else kind
            raise kind(f"{asked}: HTTP {response.status_code} {self._words(said_in(content))}".rstrip())
        if not content.strip() or "json" not in response.headers.get("content-type", ""):
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{asked}: the answer is broken JSON ({self._words(str(error))})") from None

    async def close(self) -> None:
        """Close the connections of the running event loop; the next `ask` opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _send(
        self, method: str, path: str, body: Any, params: Mapping[str, Any] | None, asked: str
    ) -> tuple[httpx.Response, bytes]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        headers["Accept-Encoding"] = "identity"  # compressed answers could exceed the size limit when unpacked
        request = self._here().stream(method, f"{self.url}{path}", json=body, params=params, headers=headers)
        async with request as response:
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) > LARGEST:
                    raise ServerError(f"{asked}: the answer is larger than {LARGEST:,} bytes")
        return response, bytes(content)

    def _here(self) -> httpx.AsyncClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop, self._client = loop, self._new_client()
        return self._client

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE)
        # Making an SSL context is slow, and servers on this machine use plain HTTP.
        verify = ssl.create_default_context() if self.url.startswith("https:") else False
        return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=verify)

    def _words(self, text: str) -> str:
        """Return text from the server as one printable line, in which stars replace our token."""
        if self._token:
            text = text.replace(self._token, "***")
        return one_line(" ".join(text.split()), SHOWN)


def said_in(content: bytes) -> str:
    """Return the error text in the body of an answer: the value under the first key of `WORDS`, or else the whole
    body."""
    text = content.decode("utf-8", "replace")
    try:
        said = json.loads(text)
        while isinstance(said, dict) and (key := next((key for key in WORDS if said.get(key)), None)):
            said = said[key]
        return said if isinstance(said, str) else json.dumps(said)
    except (ValueError, RecursionError):
        return text
