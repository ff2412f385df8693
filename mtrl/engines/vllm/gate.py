"""ASGI middleware that requires the token on every route of a vLLM server: vLLM's own `--api-key` does not protect the
routes for pauses and weights.

This module runs inside the engine's environment.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

log = logging.getLogger(__name__)

TOKEN = "MTRL_SERVER_TOKEN"
"""Name of the environment variable with the token that every request must carry."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

expected_token: bytes | None = None
"""Token that `take_token` has read; None before."""


def take_token() -> None:
    """Read the token and remove it from the environment, which processes that are started later inherit.

    Raises:
        SystemExit: no token is set; a server without a token would obey every user of this machine.
    """
    global expected_token
    token = os.environ.pop(TOKEN, "")
    if not token:
        raise SystemExit(f"error: the environment variable {TOKEN} has no token for this server")
    expected_token = token.encode()


class TokenGate:
    """Middleware that passes on requests with the token (`Authorization: Bearer TOKEN`). Other requests get a 401, and
    other web sockets are closed.

    Uncaught errors are answered here, as JSON: uvicorn would close the connection after its answer, and the next
    request on it would be lost.
    """

    def __init__(self, app: App):
        if expected_token is None:
            raise RuntimeError("no token was taken: start the server by mtrl.engines.vllm.serve")
        self._app, self._expected = app, b"Bearer " + expected_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_known(scope):
            await self._answer_errors(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(send, 401, {"error": "the token is missing or wrong"})

    async def _answer_errors(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, tracked_send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            log.exception("%s %s failed", scope["method"], scope["path"])
            await answer(send, 500, {"error": str(error) or type(error).__name__})

    def _is_known(self, scope: Scope) -> bool:
        shown = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)


async def answer(send: Send, status: int, body: Any) -> None:
    """Answer a request with JSON."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
