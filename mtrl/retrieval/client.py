"""The client of a retriever server: mtrl's own, or another that uses the same format (see `wire`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import httpx

from mtrl.errors import UserError
from mtrl.retrieval.retriever import Hit, RetrieverError, clean_queries
from mtrl.retrieval.wire import parse_answer
from mtrl.utils.http_client import error_message, is_server_error, linear_pause, printable
from mtrl.utils.serving import is_loopback

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "MTRL_RETRIEVER_TOKEN"
QUERIES_PER_REQUEST = 256
LARGEST_ANSWER = 2**28
"""Maximum size of an answer, in bytes: 10 KB for each of 100 hits of 256 queries."""
CONNECTIONS = 32
"""Maximum number of concurrent connections; further threads wait. With hundreds of connections, httpx spends more time
on the choice of a connection than on the request."""


class ServerRetriever:
    """Sends queries to the server at a URL. Threads share the retriever and its connections.

    A request that fails to arrive, or that the server answers with a status of 500 or more, is sent again after
    `backoff` seconds, then after `2 * backoff`, and so on. A refused request (400 to 499) is not sent again. The pauses
    take backoff * retries * (retries + 1) / 2 seconds together.

    Args:
        url: `http://host:port`, or a URL with a path that ends in `/retrieve`.
        timeout: maximum seconds to connect, to wait for a part of an answer, and for a whole attempt; the last part of
            an answer may end after it.
        retries: maximum number of further attempts.
        token: token for `Authorization: Bearer`; default: the environment variable MTRL_RETRIEVER_TOKEN, if it is set.
        backoff: seconds before the first retry.

    Raises:
        UserError: the URL is not valid, or a setting is out of range.
    """

    def __init__(
        self, url: str, timeout: float = 30.0, retries: int = 5, token: str | None = None, backoff: float = 1.0
    ):
        if not timeout > 0 or retries < 0 or not backoff >= 0:
            raise UserError(
                f"retriever server: timeout={timeout} must be more than 0, retries={retries} and backoff={backoff} "
                "at least 0"
            )
        self.url, self._timeout, self._retries, self._backoff = _endpoint(url), timeout, retries, backoff
        self._client = _client(self.url, timeout, token)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """See `Retriever.search`, and `parse_answer` for answers without scores.

        Raises:
            RetrieverError: the server could not be reached, refused the request, or gave a malformed answer; the
                message names the URL and the server's answer.
        """
        hits: list[list[Hit]] = [[] for _ in queries]
        pending = [(place, query) for place, query in enumerate(clean_queries(queries, topk)) if query]
        for start in range(0, len(pending), QUERIES_PER_REQUEST):
            part = pending[start : start + QUERIES_PER_REQUEST]
            found = self._ask([query for _, query in part], topk)
            for (place, _), some in zip(part, found, strict=True):
                hits[place] = some[:topk]
        return hits

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, queries: list[str], topk: int) -> list[list[Hit]]:
        request = {"queries": queries, "topk": topk, "return_scores": True}
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(linear_pause(attempt - 1, self._backoff))
            try:
                status, content = self._post(request)
            except httpx.RequestError as error:
                problem = f"could not be reached ({type(error).__name__}: {error})"
            else:
                if status == 200:
                    return self._hits(content, len(queries))
                message = printable(error_message(content)) or "nothing"
                problem = f"answered HTTP {status}: {message}"
                if not is_server_error(status):
                    raise RetrieverError(f"the retriever at {self.url} {problem}")
            log.info("the retriever at %s %s (attempt %d)", self.url, problem, attempt + 1)
        raise RetrieverError(f"the retriever at {self.url} {problem}, in {self._retries + 1} attempts")

    def _post(self, request: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request. Time and size of the whole answer are limited, as
        a server may send it one byte at a time, and without end."""
        last, content = time.monotonic() + self._timeout, bytearray()
        with self._client.stream("POST", self.url, json=request) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > LARGEST_ANSWER:
                    raise RetrieverError(f"the answer of the retriever at {self.url} exceeds {LARGEST_ANSWER} bytes")
                if time.monotonic() > last:
                    raise httpx.ReadTimeout(f"the answer did not end within {self._timeout:g} s")
            return response.status_code, bytes(content)

    def _hits(self, content: bytes, queries: int) -> list[list[Hit]]:
        try:
            return parse_answer(content, queries)
        except ValueError as error:
            raise RetrieverError(f"the retriever at {self.url} gave an answer of another form: {error}") from None


def token_of(given: str | None) -> str | None:
    """Return the given token, or that of the environment variable; None if there is neither."""
    token = (given or os.environ.get(TOKEN_VARIABLE, "")).strip()
    if not token.isascii() or not token.isprintable():
        raise UserError(f"the retriever's token (token or {TOKEN_VARIABLE}) has characters that no header can hold")
    return token or None


def _endpoint(url: str) -> str:
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host or address.query or address.userinfo:
        raise UserError(f"retriever server: url={url} is no address; write http://host:port, without user and query")
    base = url.rstrip("/")
    return base if base.endswith("/retrieve") else f"{base}/retrieve"


def _client(url: str, timeout: float, token: str | None) -> httpx.Client:
    token = token_of(token)
    return httpx.Client(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
        trust_env=not is_loopback(httpx.URL(url).host),  # a proxy cannot reach the loopback address of this machine
    )
