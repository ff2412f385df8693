"""The gateway as an ASGI application: routes of OpenAI and Anthropic, and those by which a program reports its reward.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models    GET /v1/models/{model}
    POST /v1/responses           POST /v1/responses/input_tokens
    POST /v1/messages            POST /v1/messages/count_tokens
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

from mtrl.gateway import feedback
from mtrl.gateway.auth import Credentials, SessionRegistry, check_name
from mtrl.gateway.dialects import messages, openai
from mtrl.gateway.dialects.chat import Chat
from mtrl.gateway.dialects.completions import Completion
from mtrl.gateway.dialects.dialect import Dialect, DialectType
from mtrl.gateway.dialects.messages import Messages
from mtrl.gateway.dialects.responses import Responses
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
from mtrl.gateway.requests import ChatRequest
from mtrl.gateway.stream import EventStream
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


Route = Callable[[Credentials, Scope, Receive], Awaitable[Sendable]]


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
        v1: dict[str, Route] = {
            "/chat/completions": partial(self._call, Chat),
            "/completions": partial(self._call, Completion),
            "/responses": partial(self._call, Responses),
            "/responses/input_tokens": partial(self._count, Responses, "response.input_tokens"),
            "/messages": partial(self._call, Messages),
            "/messages/count_tokens": partial(self._count, Messages, None),
        }
        self._posts: dict[str, Route] = {
            **v1,
            **{f"/v1{path}": post for path, post in v1.items()},
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
                await refusal(error, scope).send(receive, tracked_send)
        except ClientDisconnectedError:
            pass
        except Exception:
            log.exception("a request failed")
            if not started:
                message = "the request failed; the log of the gateway has the reason"
                await refusal(RequestError(500, message), scope).send(receive, tracked_send)

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
            name = self._model_name(path.removeprefix("/v1"), credentials)
            if speaks_anthropic(scope):
                return Reply(messages.models(self.model) if name is None else messages.model(name))
            return Reply(openai.models(self.model) if name is None else openai.model(name))
        raise RequestError(404, f"no route has the path {path[:200]}", "unknown_url")

    async def _call(self, dialect: DialectType, credentials: Credentials, scope: Scope, receive: Receive) -> Sendable:
        session, call = await self._read(dialect, credentials, scope, receive)
        work = partial(session.answer, call.request)
        if call.request.stream:
            return EventStream(call, work)
        async with CancelOnDisconnect(receive, work()) as running:
            return Reply(call.body(await running.result()))

    async def _count(
        self, dialect: DialectType, kind: str | None, credentials: Credentials, scope: Scope, receive: Receive
    ) -> Reply:
        """Return the number of tokens of a request's context, without an answer; `kind` is the reply's `object`."""
        session, call = await self._read(dialect, credentials, scope, receive)
        assert isinstance(call.request, ChatRequest)
        counted = {"input_tokens": session.count_tokens(call.request)}
        return Reply(counted if kind is None else {"object": kind, **counted})

    async def _read(
        self, dialect: DialectType, credentials: Credentials, scope: Scope, receive: Receive
    ) -> tuple[Session, Dialect]:
        session = self.registry.find_or_open(credentials)  # first, so that no body of an unknown client is read
        return session, dialect(await read_json(scope, receive, self.max_body), self.model, session)

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

    def _model_name(self, path: str, credentials: Credentials) -> str | None:
        """Return the model that a path below `/models` names; None if it names none."""
        if not self.registry.is_admin(credentials):
            self.registry.find(credentials)
        if path == "/models":
            return None
        name = path.removeprefix("/models/")
        if name != self.model:
            raise RequestError(404, f"there is no model {name[:200]}; use {self.model}", "model_not_found", "model")
        return name


def refusal(error: RequestError, scope: Scope) -> Reply:
    """Return the response to a refused request. Clients repeat some statuses unless a header forbids it."""
    headers = []
    if not is_temporary(error.status) or error.code in FINAL_CODES:
        headers.append((b"x-should-retry", b"false"))
    elif error.status == 429:
        headers.append((b"retry-after", b"1"))
    if error.status == 408:  # not after 413: a client that is still sending would not see the response
        headers.append((b"connection", b"close"))
    body = messages.error_body(error) if speaks_anthropic(scope) else error.body()
    return Reply(body, error.status, headers)


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a client of Anthropic's API sent this request: the API requires a header with its version."""
    return any(header == b"anthropic-version" for header, _ in scope["headers"]) or "/messages" in scope["path"]


def read_path(scope: Scope) -> tuple[str, Credentials]:
    """Return the route without the part that names the trajectory, and the credentials of the request."""
    bearer, api_key, names = None, None, []
    for header, value in scope["headers"]:
        if header == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                bearer = token.strip().decode("latin-1")
        elif header == b"x-api-key":
            api_key = value.strip().decode("latin-1") or None
        elif header in TRAJECTORY_HEADERS:
            names.append(value.decode("latin-1"))
    # The path is split before it is unquoted, because a name may contain a slash.
    path, segment = scope["raw_path"].decode("latin-1"), None
    if path.startswith("/trajectories/"):
        quoted, _, rest = path.removeprefix("/trajectories/").partition("/")
        segment, path = unquote(quoted) or None, f"/{rest}"
    return unquote(path).rstrip("/") or "/", Credentials(bearer or api_key, segment, tuple(names))
