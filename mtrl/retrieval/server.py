"""A retriever as an HTTP server; `wire` defines the format."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from mtrl.retrieval.client import TOKEN_VARIABLE
from mtrl.retrieval.retriever import Retriever
from mtrl.retrieval.wire import parse_request, write_answer

log = logging.getLogger(__name__)

LARGEST_BODY = 8 * 2**20
"""Maximum size of the body of a request, in bytes."""
SECONDS_TO_SEND = 30
"""Maximum time for receiving the body of a request, in seconds."""


class SearchRefusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


def create_app(retriever: Retriever, topk: int, about: dict[str, Any], token: str | None, pool: Executor) -> Any:
    """Create the FastAPI application with `POST /retrieve` and `GET /health`.

    Args:
        topk: number of hits per query, if a request sets none.
        about: values that `/health` returns besides its status, to any client.
        token: token that `/retrieve` requires as `Authorization: Bearer`; None: it requires none.
        pool: threads that parse requests and search, which would block the event loop.
    """
    import fastapi

    app: Any = fastapi.FastAPI(title="mtrl retriever", docs_url=None, redoc_url=None, openapi_url=None)

    def answer(body: bytes) -> bytes:
        try:
            request = parse_request(body)
        except ValueError as error:
            raise SearchRefusal(422, str(error)) from None
        return write_answer(retriever.search(request.queries, request.topk or topk), request.return_scores)

    async def refuse(_: Any, refusal: Any) -> Any:
        return fastapi.responses.JSONResponse({"detail": str(refusal)}, refusal.status)

    async def retrieve(request: Any) -> Any:
        if token is not None and not _has_token(request.headers.get("authorization", ""), token):
            raise SearchRefusal(401, f"the token is missing or wrong; set {TOKEN_VARIABLE} to the server's")
        body = await _body(request.receive)
        try:
            content = await asyncio.get_running_loop().run_in_executor(pool, answer, body)
        except SearchRefusal:
            raise
        except Exception:
            log.exception("a search failed")
            raise SearchRefusal(500, "the search failed; the server's log says why") from None
        return fastapi.Response(content, media_type="application/json")

    async def health(_: Any) -> Any:
        return fastapi.responses.JSONResponse({"status": "ok", **about})

    # Plain routes, because `parse_request` checks the body, and its errors are sentences.
    app.add_exception_handler(SearchRefusal, refuse)
    app.add_route("/retrieve", retrieve, methods=["POST"])
    app.add_route("/health", health, methods=["GET"])
    return app


def _has_token(header: str, token: str) -> bool:
    return hmac.compare_digest(header.encode(), f"Bearer {token}".encode())


async def _body(receive: Callable[[], Awaitable[dict[str, Any]]]) -> bytes:
    """Return the whole body, if it is small enough and arrives in time."""
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise SearchRefusal(400, "the connection ended before the body did")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > LARGEST_BODY:
                    raise SearchRefusal(413, f"the body is larger than {LARGEST_BODY} bytes; send fewer queries")
    except TimeoutError:
        raise SearchRefusal(408, f"the body did not come within {SECONDS_TO_SEND} s") from None
    return bytes(body)
