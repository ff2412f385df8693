"""One server of an engine: its start, its health checks and its end."""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mtrl.engines.server.adapters import Adapters
from mtrl.engines.server.backend import ServerBackend, ServerPlace
from mtrl.engines.server.process import ServerProcess, free_port
from mtrl.engines.server.router import ReplicaLoad
from mtrl.engines.server.server_api import ServerApi, ServerError, ServerRefusedError
from mtrl.engines.server.sync import Weights
from mtrl.utils.text import one_line

MAX_PORTS = 5
"""Maximum number of ports that are tried if other processes keep taking them."""
HEALTH_CHECK_SECONDS = 10.0
"""Seconds between two health checks, and the timeout of one."""
MAX_MISSES = 3
"""Number of failed health checks in a row after which a server is lost."""
FIRST_PAUSE = 0.1
"""First pause between two readiness checks, in seconds; later ones are longer."""
LONGEST_PAUSE = 2.0
"""Maximum pause between two readiness checks, in seconds."""
MAX_ERROR_CHARACTERS = 400
"""Maximum number of characters of a server's log in an error."""


class Replica(ABC):
    """Base class of all servers. Every method but `kill` must be called on the event loop that the replica is attached
    to."""

    api: ServerApi
    is_restartable = True
    """Whether the server can be restarted."""

    def __init__(self, backend: ServerBackend, name: str):
        self.backend, self.name = backend, name
        self.load = ReplicaLoad()
        self.weights: Weights | None = None
        """Weights that were sent last; None: the server has those that it was started with."""
        self.versions: list[int] = []
        """Policy versions of the server's weights since its start, the newest last; empty: it has not started."""
        self.adapters = Adapters()
        self.token: str | None = None
        """Token that every request must carry."""
        self.failures = 0
        """Number of times that the server was lost in a row, without a turn sampled in between."""
        self._sampled = False
        """Whether the server has sampled a turn since the last health check."""
        self.failure: str | None = None
        """Reason why the server was given up; None while it is in use."""
        self.attach()

    def attach(self) -> None:
        """Use the replica on the running event loop from now on."""
        self._suspected, self._given_up = asyncio.Event(), asyncio.Event()
        if self.failure is not None:
            self._given_up.set()

    @property
    def is_up(self) -> bool:
        """Whether the server has started and has not been given up since."""
        return bool(self.versions) and self.failure is None

    @property
    @abstractmethod
    def advice(self) -> str:
        """Advice for the user if the server does not start."""

    async def start(self) -> None:
        """Start the server, and return when it can sample.

        Raises:
            ServerError: the server cannot sample within `start_timeout`; the message contains the error of its log.
        """
        self.failure, self.weights, self.versions, self.adapters = None, None, [], Adapters()
        self.attach()
        seconds = self.backend.settings.start_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._start()
                self.versions = [await self.api.version()]
        except TimeoutError:
            key = f"generator.{self.backend.name}.start_timeout"
            raise ServerError(f"was not ready within {key}={seconds:g} s{self._last_error()}") from None

    async def until_lost(self, on_answer: Callable[[bool], None]) -> str:
        """Run health checks until the server has ended, hangs or was given up, and return the reason.

        Args:
            on_answer: function that receives whether the server passed a check.
        """
        misses = 0
        while not await self._ended(HEALTH_CHECK_SECONDS / 2 if misses else HEALTH_CHECK_SECONDS):
            self._suspected.clear()
            misses = 0 if await self.is_reachable() or self._sampled else misses + 1
            self._sampled = False
            if misses == MAX_MISSES:
                return f"failed {MAX_MISSES} health checks in a row"
            if self.failure is None:
                on_answer(misses == 0)
        return self.failure or self._exit_description()

    def record_turn(self) -> None:
        """Note that the server has sampled a turn."""
        self.failures, self._sampled = 0, True

    def suspect(self) -> None:
        """Note that a turn had no answer: the server gets no more turns before it passes a health check."""
        self.load.serving, self._sampled = False, False  # what it sampled before shows nothing about it now
        self._suspected.set()

    def give_up(self, reason: str) -> None:
        """Give the server up: it gets no more turns before a restart."""
        self.load.serving = False
        self.failure = self.failure or one_line(reason, 2 * MAX_ERROR_CHARACTERS)
        self._given_up.set()

    async def end(self) -> None:
        """End the server, or at least close the connections to it."""
        if hasattr(self, "api"):
            with suppress(Exception):
                async with asyncio.timeout(HEALTH_CHECK_SECONDS):
                    await self.api.close()

    @abstractmethod
    def kill(self) -> None:
        """End the server immediately; no event loop need run."""

    @abstractmethod
    async def _start(self) -> None:
        """Start the server, and return when it can sample."""

    async def _ended(self, seconds: float) -> bool:
        """Wait for `seconds`, or until the server has ended or is given up or suspected. Return whether it has ended or
        is given up."""
        await _wait_for_first(seconds, self._given_up.wait(), self._suspected.wait())
        return self.failure is not None

    async def is_reachable(self) -> bool:
        """Whether the server answers a health check of this process."""
        try:
            async with asyncio.timeout(HEALTH_CHECK_SECONDS):
                return await self.api.is_alive()
        except (ServerError, TimeoutError):
            return False

    async def _until_ready(self) -> None:
        pause = FIRST_PAUSE
        while not await self._is_ready():
            if await self._ended(pause):
                raise ServerError(self.failure or self._exit_description())
            pause = min(1.5 * pause, LONGEST_PAUSE)

    async def _is_ready(self) -> bool:
        try:
            return await self.api.is_ready()
        except ServerError:
            return False

    @abstractmethod
    def _exit_description(self) -> str:
        """Return a phrase about how the server ended."""

    @abstractmethod
    def _last_error(self) -> str:
        """Return the error in the server's log, as the end of a sentence; empty where there is no log."""


class ExternalReplica(Replica):
    """A server at a given URL, which mtrl has not started and does not end."""

    is_restartable = False

    def __init__(self, backend: ServerBackend, url: str):
        super().__init__(backend, f"the server {url}")
        self.url = url

    @property
    def advice(self) -> str:
        name, key = self.backend.name, self.backend.settings.api_key_env
        return (
            f"check that it runs at this address of generator.{name}.urls, and that the environment variable "
            f"generator.{name}.api_key_env={key} holds its token; without urls mtrl starts servers itself"
        )

    def kill(self) -> None:
        """Do nothing: mtrl did not start the server."""

    async def _start(self) -> None:
        key = self.backend.settings.api_key_env
        self.token = os.environ.get(key, "").strip() or None
        self.api = self.backend.make_api(self.url, self.token)
        await self._until_ready()

    async def _is_ready(self) -> bool:
        try:
            return await self.api.is_ready()
        except ServerRefusedError:  # such as a wrong token, which waiting cannot change
            raise
        except ServerError:
            return False

    def _exit_description(self) -> str:
        return "has ended"

    def _last_error(self) -> str:
        return ""


class ManagedReplica(Replica):
    """A server that this process starts on this machine."""

    def __init__(self, backend: ServerBackend, index: int, log: Path, devices: Sequence[int] | None):
        super().__init__(backend, f"{backend.name} server {index}")
        self.log, self.devices = log, devices
        self.process: ServerProcess | None = None

    @property
    def advice(self) -> str:
        name, settings = self.backend.name, self.backend.settings
        return (
            f"check its arguments, generator.{name}.args={dict(settings.args)}, and its interpreter, "
            f"generator.{name}.python={settings.python}"
        )

    async def end(self) -> None:
        await super().end()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)

    def kill(self) -> None:
        if self.process is not None:
            self.process.end(0)

    async def _start(self) -> None:
        for attempt in range(MAX_PORTS):
            self.token = secrets.token_urlsafe(24)
            place = ServerPlace(free_port(), self.token, self.devices)
            self.process = ServerProcess(self.backend.make_command(place), self.log, self.name)
            self.api = self.backend.make_api(f"http://127.0.0.1:{place.port}", self.token)
            try:
                await self._until_ready()
                return
            except ServerError:
                if not self.process.lost_port or attempt == MAX_PORTS - 1:
                    raise

    async def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.lost_port:  # SGLang does not end when its port is taken
            raise ServerError(self._exit_description())
        return await super()._is_ready()

    async def _ended(self, seconds: float) -> bool:
        assert self.process is not None
        await _wait_for_first(seconds, self._given_up.wait(), self._suspected.wait(), self.process.wait())
        return self.failure is not None or not self.process.running

    def _exit_description(self) -> str:
        assert self.process is not None
        return f"{self.process.end()}{self._last_error()}"

    def _last_error(self) -> str:
        assert self.process is not None
        line = one_line(self.process.error_line(), MAX_ERROR_CHARACTERS)
        return f' with the error "{line}" (its log is {self.log})' if line else f" (its log is {self.log})"


async def _wait_for_first(seconds: float, *events: Awaitable[object]) -> None:
    """Wait for the first of these events, for at most `seconds`."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
