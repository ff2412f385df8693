"""The gateway as an ASGI application: OpenAI's routes, and the routes by which a program reports its reward.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models    GET /v1/models/{model}
    POST /update-reward          POST /complete-rollout  GET /health
    POST /trajectories                                   (with the admin's key, if the gateway has one)

All routes but the last two also exist below `/trajectories/{token or name}`. The application is plain ASGI, because the
work of a framework between a request and its route would cost more than all the code here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote
from uuid import uuid4

from mtrl.gateway import feedback, respond
from mtrl.gateway.auth import Credentials, SessionRegistry, check_name
from mtrl.gateway.exchange import (
    CancelOnDisconnect,
    ClientDisconnectedError,
    Receive,
    Reply,
    RequestError,
    Scope,
    Send,
    read_json,
)
from mtrl.gateway.requests import ChatRequest, CompletionRequest
from mtrl.gateway.respond import Answer
from mtrl.gateway.stream import ChatChunks, CompletionChunks, EventStream
from mtrl.utils.http_client import is_temporary

if TYPE_CHECKING:
    from mtrl.gateway.session import Session
    from mtrl.rollout.conversation import Codec

log = logging.getLogger(__name__)

TRAJECTORY_HEADERS = (b"x-mtrl-trajectory-id", b"x-amzn-sagemaker-trajectory-id")
"""Headers that name a trajectory."""
MAX_REPORT_BYTES = 256 << 10
"""Maximum size of a report, in bytes. A report is read before its sender is known, because its body may name the
trajectory."""
FINAL_CODES = frozenset({"max_calls", "trajectory_exists", "trajectory_complete"})
"""Codes of errors whose status asks the client to try again (429 and 409), although no retry can succeed."""


class Sendable(Protocol):
    """A `Reply` or an `EventStream`."""

    async def send(self, receive: Receive, send: Send) -> None: ...


@dataclass
class App:
    """Routes requests to the sessions that they name."""

    registry: SessionRegistry
    codec: Codec
    model: str
    max_body: int
    describe: Callable[[Session], dict[str, str]]
    """Function that returns the description of a trajectory for the admin."""

    def __post_init__(self) -> None:
        chat, complete = partial(self._call, self._chat), partial(self._call, self._complete)
        self._posts: dict[str, Callable[[Credentials, Scope, Receive], Awaitable[Sendable]]] = {
            "/v1/chat/completions": chat,
            "/v1/completions": complete,
            "/chat/completions": chat,
            "/completions": complete,
            "/update-reward": partial(self._report, feedback.update_reward),
            "/complete-rollout": partial(self._report, feedback.complete_rollout),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def tracked_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            try:
                reply = await self._answer(scope, receive)
                await reply.send(receive, tracked_send)
            except RequestError as error:
                await refusal(error).send(receive, tracked_send)
        except ClientDisconnectedError:
            pass
        except Exception:
            log.exception("a request failed")
            if not started:
                message = "the request failed; the log of the gateway has the reason"
                await refusal(RequestError(500, message)).send(receive, tracked_send)

    async def _answer(self, scope: Scope, receive: Receive) -> Sendable:
        path, credentials = read_path(scope)
        method = scope["method"]
        post = self._posts.get(path)
        if post is not None:
            if method != "POST":
                raise RequestError(405, f"{path} accepts only POST")
            return await post(credentials, scope, receive)
        if method == "POST" and path == "/trajectories" and self.registry.open_session is not None:
            return await self._open(credentials, scope, receive)
        if method == "GET" and path == "/health":
            return Reply({"status": "healthy"})
        if method == "GET" and path.removeprefix("/v1").startswith("/models"):
            return self._models(path.removeprefix("/v1"), credentials)
        raise RequestError(404, f"no route has the path {path[:200]}", "unknown_url")

    async def _call(
        self,
        answer: Callable[[Session, Any, Receive], Awaitable[Sendable]],
        credentials: Credentials,
        scope: Scope,
        receive: Receive,
    ) -> Sendable:
        session = self.registry.find_or_open(credentials)  # first, so that no body of an unknown client is read
        return await answer(session, await read_json(scope, receive, self.max_body), receive)

    async def _chat(self, session: Session, body: Any, receive: Receive) -> Sendable:
        request = ChatRequest.from_json(body)
        answer, codec = Answer(request.model or self.model), self.codec if request.logprobs else None
        if request.stream:
            chunks = ChatChunks(answer, request.n, codec, request.include_usage)
            return EventStream(chunks.opening(), partial(session.chat, request), chunks.chunks)
        async with CancelOnDisconnect(receive, session.chat(request)) as work:
            calls = await work.result()
        return Reply(respond.chat_completion(answer, calls, codec))

    async def _complete(self, session: Session, body: Any, receive: Receive) -> Sendable:
        request = CompletionRequest.from_json(body)
        answer = Answer(request.model or self.model, "text_completion", f"cmpl-{uuid4().hex}")
        codec = self.codec if request.logprobs else None
        if request.stream:
            chunks = CompletionChunks(answer, codec, request.include_usage)
            return EventStream([], partial(session.complete, request), chunks.chunks)
        async with CancelOnDisconnect(receive, session.complete(request)) as work:
            calls = await work.result()
        return Reply(respond.completion(answer, calls, codec))

    async def _report(
        self,
        apply: Callable[[Session, dict[str, Any]], dict[str, Any]],
        credentials: Credentials,
        scope: Scope,
        receive: Receive,
    ) -> Reply:
        report = await read_json(scope, receive, min(MAX_REPORT_BYTES, self.max_body))
        named = feedback.trajectory_of(report)
        if named is not None:
            credentials = replace(credentials, names=(*credentials.names, named))
        try:
            return Reply(apply(self.registry.find(credentials), report))
        except RequestError as error:
            raise (RequestError(404, error.message, error.code) if error.status == 410 else error) from None

    async def _open(self, credentials: Credentials, scope: Scope, receive: Receive) -> Reply:
        assert self.registry.open_session is not None
        if not self.registry.is_admin(credentials):
            raise RequestError(401, "only the admin's key opens a trajectory", "invalid_api_key")
        body = await read_json(scope, receive, self.max_body)
        if not isinstance(body, dict):
            raise RequestError(400, "the body is not a JSON object; send one with an id, or an empty one")
        name = check_name(body.get("id") or uuid4().hex)
        if name in self.registry:
            raise RequestError(
                409, f"the id {name} belongs to another trajectory; choose a new one", "trajectory_exists", "id"
            )
        return Reply(self.describe(self.registry.open_session(name)))

    def _models(self, path: str, credentials: Credentials) -> Reply:
        if not self.registry.is_admin(credentials):
            self.registry.find(credentials)
        if path == "/models":
            return Reply(respond.models(self.model))
        name = path.removeprefix("/models/")
        if name != self.model:
            raise RequestError(404, f"there is no model {name[:200]}; use {self.model}", "model_not_found", "model")
        return Reply(respond.model(name))


def refusal(error: RequestError) -> Reply:
    """Return the response to a refused request. OpenAI's clients repeat some statuses unless a header forbids it."""
    headers = []
    if not is_temporary(error.status) or error.code in FINAL_CODES:
        headers.append((b"x-should-retry", b"false"))
    elif error.status == 429:
        headers.append((b"retry-after", b"1"))
    if error.status == 408:  # not after 413: a client that is still sending would not see the response
        headers.append((b"connection", b"close"))
    return Reply(error.body(), error.status, headers)


def read_path(scope: Scope) -> tuple[str, Credentials]:
    """Return the route without the part that names the trajectory, and the credentials of the request."""
    bearer, names = None, []
    for header, value in scope["headers"]:
        if header == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                bearer = token.strip().decode("latin-1")
        elif header in TRAJECTORY_HEADERS:
            names.append(value.decode("latin-1"))
    # The path is split before it is unquoted, because a name may contain a slash.
    path, segment = scope["raw_path"].decode("latin-1"), None
    if path.startswith("/trajectories/"):
        quoted, _, rest = path.removeprefix("/trajectories/").partition("/")
        segment, path = unquote(quoted) or None, f"/{rest}"
    return unquote(path).rstrip("/") or "/", Credentials(bearer, segment, tuple(names))
