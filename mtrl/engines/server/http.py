"""A client for JSON over HTTP to one server of an engine. Answers are not trusted: their time and size are limited."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from mtrl.engines.server.server_api import ServerBusyError, ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.errors import UserError
from mtrl.utils.http_client import (
    BUSY,
    ResponseTooLargeError,
    error_message,
    exception_message,
    is_temporary,
    printable,
    read_body,
)

LARGEST = 2**26
"""Maximum size of an answer, in bytes; a turn of 100,000 tokens with their log-probs takes a tenth of it."""
IDLE_SECONDS = 2.0
"""Seconds for which an idle connection stays open. Servers keep connections open for longer (uvicorn: 5), so that no
request is sent on a connection that the server is closing."""


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
            raise UserError(f"the token for the server {url} is not valid: it must be printable ASCII without spaces")
        self.url, self._token = url.rstrip("/"), token
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self, method: str, path: str, body: Any = None, *, seconds: float, params: Mapping[str, Any] | None = None
    ) -> Any:
        """Send a request and return the parsed JSON of the answer, or None where the answer is empty or not JSON.

        Args:
            body: body of the request, sent as JSON; None: no body.
            seconds: timeout for the whole answer, in seconds.
            params: parameters of the query.

        Raises:
            ServerUnreachableError: no answer in time, or the connection failed.
            ServerRefusedError: a status between 300 and 499 that does not ask for a retry.
            ServerBusyError: status 429 or 503.
            ServerError: another status that asks for a retry, a status of 500 or above, or an answer that is too large
                or broken.
        """
        description = f"{method} {self.url}{path}"
        try:
            async with asyncio.timeout(seconds):
                response, content = await self._send(method, path, body, params)
        except TimeoutError:
            raise ServerUnreachableError(f"{description}: no answer within {seconds:g} s") from None
        except ResponseTooLargeError as error:
            raise ServerError(f"{description}: {error}") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerRefusedError(f"{description}: {self._printable(str(error))}") from None
        except (httpx.HTTPError, OSError) as error:
            raise ServerUnreachableError(f"{description}: {self._printable(exception_message(error))}") from None
        if not response.is_success:
            kind = ServerError if is_temporary(response.status_code) else ServerRefusedError
            kind = ServerBusyError if response.status_code in BUSY else kind
            message = self._printable(error_message(content))
            raise kind(f"{description}: HTTP {response.status_code} {message}".rstrip())
        if not content.strip() or "json" not in response.headers.get("content-type", ""):
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{description}: the answer is broken JSON ({self._printable(str(error))})") from None

    async def close(self) -> None:
        """Close the connections of the running event loop; the next `request` opens new ones."""
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def _send(
        self, method: str, path: str, body: Any, params: Mapping[str, Any] | None
    ) -> tuple[httpx.Response, bytes]:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        headers["Accept-Encoding"] = "identity"  # compressed answers could exceed the size limit when unpacked
        request = self._current_client().stream(method, f"{self.url}{path}", json=body, params=params, headers=headers)
        async with request as response:
            return response, await read_body(response.aiter_raw(), LARGEST)

    def _current_client(self) -> httpx.AsyncClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop, self._client = loop, self._new_client()
        return self._client

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS)
        # Making an SSL context is slow, and servers on this machine use plain HTTP.
        verify = ssl.create_default_context() if self.url.startswith("https:") else False
        return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=verify)

    def _printable(self, text: str) -> str:
        return printable(text, self._token)
