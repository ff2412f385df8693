"""The gateway: an engine behind OpenAI's API, for as many programs at once as there are trajectories."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import uvicorn

from mtrl.gateway.app import App
from mtrl.gateway.auth import Register, new_token
from mtrl.gateway.session import Session, SessionLimits
from mtrl.generator.conversation import Codec
from mtrl.generator.engines.base import Engine, SamplingParams
from mtrl.http_protocol import PatientProtocol
from mtrl.serving import address_of, bind

MODEL = "mtrl"
"""What the gateway calls the one model that it has; requests may call it as they like."""
MOST_CONNECTIONS = 8_192
"""Further ones are answered with 503, which clients take as a reason to come again."""
SPARE_FILES = 512
"""File descriptors that are left to the rest of the process."""
KEEP_ALIVE = 75
"""Seconds for which an idle connection is kept: longer than the clients that programs use keep theirs, so that none is
lost to a server that closes it at this very moment."""
SECONDS_TO_START = 30.0
SECONDS_TO_CLOSE = 5.0


class Gateway:
    """Programs ask it, each in the name of a trajectory; whoever plays the trajectories opens and closes them.

    It may be used from one event loop after the other; the address stays.
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
            port: 0 is a free one.
            max_body: bytes of a request.
            key: section of the configuration that host and port come from; errors name it.
        """
        self.engine, self.codec, self.limits, self.max_body = engine, codec, limits, max_body
        self.register = Register()
        self._address, self._key = (host, port), key
        self._bound: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`; there is none before the start."""
        assert self._bound is not None, "the gateway has not been started"
        return address_of(self._bound)

    def base_url(self, session: Session) -> str:
        """Where a program asks that knows no key: whoever has this URL is this trajectory."""
        return f"{self.trajectory_url(session)}/v1"

    def trajectory_url(self, session: Session) -> str:
        """Where a program reports what it was paid."""
        return f"{self.url}/trajectories/{session.token}"

    def open(self, name: str, sampling: SamplingParams) -> Session:
        """A trajectory that programs may ask in the name of.

        Raises:
            ValueError: one of this name is open.
        """
        session = Session(name, self.engine, self.codec, sampling, self.limits, new_token())
        self.register.add(session)
        return session

    def introduce(self, session: Session) -> dict[str, str]:
        """What a program needs to know of its trajectory."""
        return {
            "id": session.name,
            "token": session.token,
            "base_url": self.base_url(session),
            "feedback_url": self.trajectory_url(session),
            "model": MODEL,
        }

    def admit(self, key: str, make: Callable[[str], Session], used: Iterable[str] = ()) -> None:
        """Let whoever shows this key open trajectories, before the start: by `POST /trajectories`, or by the first call
        that names one.

        Args:
            make: opens the trajectory of a name.
            used: names that no trajectory may have any more.
        """
        self.register.admin_key, self.register.admit = key, make
        self.register.used.update(used)

    def close_session(self, session: Session) -> None:
        """End it: what is sampled for it is aborted, and later requests are told that it is over."""
        self.register.remove(session)
        session.close()

    async def start(self) -> None:
        """Serve on the running event loop; once it does so already, nothing happens.

        Raises:
            UserError: the address cannot be had.
            RuntimeError: the server does not start.
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
        self._serving = asyncio.create_task(self._server.run_until_told(self._bound), name="mtrl-gateway")
        ready = asyncio.create_task(self._server.ready.wait())
        try:
            async with asyncio.timeout(SECONDS_TO_START):
                await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
            if not self._server.ready.is_set():
                raise RuntimeError("the gateway does not start") from self._serving.exception()
        finally:
            ready.cancel()

    async def close(self) -> None:
        """Close all sessions and all connections, and give the address back. It may be repeated."""
        for session in list(self.register):
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
        app = App(self.register, self.codec, MODEL, self.max_body, self.introduce)
        return uvicorn.Config(
            app, http=PatientProtocol, loop="asyncio", ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, server_header=False, proxy_headers=False, limit_concurrency=_room(),
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=1, h11_max_incomplete_event_size=64 << 10,
        )  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn as one task among others: signals are not its business."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def run_until_told(self, bound: socket.socket) -> None:
        """The socket stays open, for the next event loop."""
        own = bound.dup()
        try:
            await self.serve(sockets=[own])
        finally:  # the loop may end without a word
            for server in getattr(self, "servers", ()):
                server.close()
            own.close()
            for connection in list(self.server_state.connections):
                connection.transport.abort()


def _room() -> int:
    """So many connections at once; the process is allowed as many files as that takes, where the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, soft - SPARE_FILES))
