"""The gateway: an engine behind OpenAI's API, for many programs at once, each with its own trajectory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn

from mtrl.engines.base import Engine, SamplingParams
from mtrl.gateway.app import App
from mtrl.gateway.auth import SessionRegistry, new_token
from mtrl.gateway.session import Session, SessionLimits
from mtrl.rollout.conversation import Codec
from mtrl.utils.http_protocol import PatientProtocol
from mtrl.utils.process import allow_open_files
from mtrl.utils.serving import address_of, bind

MODEL = "mtrl"
"""Name of the gateway's only model; requests may use any name for it."""
MAX_CONNECTIONS = 8_192
"""Maximum number of connections. Further ones are answered with 503, after which clients try again."""
SPARE_FILES = 512
"""Number of file descriptors that are left to the rest of the process."""
KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open. It is longer than the limit of usual clients, so that no request is
lost because the server closes its connection at the same moment."""
SECONDS_TO_START = 30.0
SECONDS_TO_CLOSE = 5.0


class Gateway:
    """Server that programs call, each for one trajectory. The owner of the gateway opens and closes the trajectories.

    It may be used from several event loops, one after the other; the address stays the same.
    """

    def __init__(
        self,
        engine: Engine,
        codec: Codec,
        limits: SessionLimits,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body: int = 8 << 20,
        key: str = "generator.agent",
    ):
        """
        Args:
            port: TCP port; 0 selects a free one.
            max_body: maximum size of a request's body, in bytes.
            key: section of the configuration that host and port come from, for error messages.
        """
        self.engine, self.codec, self.limits, self.max_body = engine, codec, limits, max_body
        self.registry = SessionRegistry()
        self._address, self._key = (host, port), key
        self._bound: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Address of the gateway, such as `http://127.0.0.1:PORT`; available after the start."""
        assert self._bound is not None, "the gateway has not been started"
        return address_of(self._bound)

    def base_url(self, session: Session) -> str:
        """Return the base URL for a program without a key: the URL itself authenticates the trajectory."""
        return f"{self.trajectory_url(session)}/v1"

    def trajectory_url(self, session: Session) -> str:
        """Return the URL below which a program reports its reward."""
        return f"{self.url}/trajectories/{session.token}"

    def open(self, name: str, sampling: SamplingParams) -> Session:
        """Open a trajectory for which programs may make requests.

        Raises:
            ValueError: a trajectory of this name is open.
        """
        session = Session(name, self.engine, self.codec, sampling, self.limits, new_token())
        self.registry.add(session)
        return session

    def describe(self, session: Session) -> dict[str, str]:
        """Return the description of a trajectory that a program needs."""
        return {
            "id": session.name,
            "token": session.token,
            "base_url": self.base_url(session),
            "feedback_url": self.trajectory_url(session),
            "model": MODEL,
        }

    def allow_admin(self, key: str, open_session: Callable[[str], Session], used: Iterable[str] = ()) -> None:
        """Let clients with this key open trajectories, by `POST /trajectories` or by the first call that names one.

        It must be called before the start.

        Args:
            key: the admin's key.
            open_session: function that opens the trajectory of a name.
            used: names that no new trajectory may have.
        """
        self.registry.admin_key, self.registry.open_session = key, open_session
        self.registry.used.update(used)

    def close_session(self, session: Session) -> None:
        """Close a session: running calls are aborted, and later requests get the error that the trajectory is over."""
        self.registry.remove(session)
        session.close()

    async def start(self) -> None:
        """Serve on the running event loop; do nothing if the gateway already serves on it.

        Raises:
            UserError: the gateway cannot listen on its address.
            RuntimeError: the server does not start, or serves on another event loop.
        """
        if self._serving is not None and not self._serving.done():
            if self._serving.get_loop() is asyncio.get_running_loop():
                return
            if not self._serving.get_loop().is_closed():
                raise RuntimeError("the gateway serves on another event loop, which still runs")
        if self._bound is None:
            host, port = self._address
            self._bound = bind(host, port, "one for each trajectory", "", f"{self._key}.{{}}={{}}")
        self._server = _Server(self._config())
        self._serving = asyncio.create_task(self._server.serve_until_exit(self._bound), name="mtrl-gateway")
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            async with asyncio.timeout(SECONDS_TO_START):
                await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
            if not self._server.ready.is_set():
                raise RuntimeError("the gateway does not start") from self._serving.exception()
        finally:
            ready.cancel()

    async def close(self) -> None:
        """Close all sessions and all connections, and release the address. It may be called repeatedly."""
        for session in list(self.registry):
            self.close_session(session)
        serving, self._serving = self._serving, None
        if serving is not None and self._server is not None and serving.get_loop() is asyncio.get_running_loop():
            self._server.should_exit = True
            done, _ = await asyncio.wait((serving,), timeout=SECONDS_TO_CLOSE)
            if not done:
                serving.cancel()
                await asyncio.wait((serving,))
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def _config(self) -> uvicorn.Config:
        app = App(self.registry, self.codec, MODEL, self.max_body, self.describe)
        return uvicorn.Config(
            app, http=PatientProtocol, loop="asyncio", ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, server_header=False, proxy_headers=False, limit_concurrency=_max_connections(),
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=64 << 10,
        )  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn as one task among others; it does not handle signals."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def serve_until_exit(self, bound: socket.socket) -> None:
        """Serve until `should_exit` is set. `bound` stays open, for the next event loop."""
        duplicate = bound.dup()
        try:
            await self.serve(sockets=[duplicate])
        finally:  # the loop may end without a shutdown of the server
            for server in getattr(self, "servers", ()):
                server.close()
            duplicate.close()
            for connection in list(self.server_state.connections):
                connection.transport.abort()


def _max_connections() -> int:
    """Return the maximum number of connections, after raising the process's limit of open files as far as needed and
    allowed."""
    limit = allow_open_files(MAX_CONNECTIONS + SPARE_FILES)
    return MAX_CONNECTIONS if limit is None else max(1, min(MAX_CONNECTIONS, limit - SPARE_FILES))
