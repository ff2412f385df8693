"""One server of an engine: how it starts, whether it lives, and how it ends."""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl.generator.engines.server.adapters import Adapters
from mtrl.generator.engines.server.api import ServerApi, ServerError, ServerRefusedError
from mtrl.generator.engines.server.backend import Backend, Place
from mtrl.generator.engines.server.process import ServerProcess, free_port
from mtrl.generator.engines.server.router import Lane
from mtrl.tracking.text import one_line

if TYPE_CHECKING:
    from mtrl.generator.engines.server.update import Weights

PORTS = 5
"""So many ports are tried before one that others keep taking is an error."""
LOOK = 10.0
"""Seconds between two questions whether it is alive, and for an answer."""
MISSES = 3
"""A server that does not answer so many of them in a row is lost."""
FIRST_PAUSE = 0.1
"""Seconds between two questions whether it is ready, which become longer."""
LONGEST_PAUSE = 2.0
WORDS = 400
"""Characters of a server's own words in an error."""


class Replica(ABC):
    """What all servers have in common. Every method but `kill` is called on the event loop that it is attached to."""

    api: ServerApi
    comes_back = True
    """Whether it can be started again."""

    def __init__(self, backend: Backend, name: str):
        self.backend, self.name = backend, name
        self.lane = Lane()
        self.weights: Weights | None = None
        """What it was sent last; None: those that it was started with."""
        self.versions: list[int] = []
        """Policy versions of its weights since it was started, the newest last; empty: it is not started."""
        self.adapters = Adapters()
        self.failures = 0
        """How often it was lost without a turn sampled in between."""
        self._sampled = False
        """Whether it has sampled since it was last asked whether it is there."""
        self.why: str | None = None
        """Why it was given up; None while it is not."""
        self.attach()

    def attach(self) -> None:
        """From now on it is used by another event loop."""
        self._doubted, self._given_up = asyncio.Event(), asyncio.Event()
        if self.why is not None:
            self._given_up.set()

    @property
    def is_up(self) -> bool:
        """Whether it is started, and nobody knows better."""
        return bool(self.versions) and self.why is None

    @property
    @abstractmethod
    def advice(self) -> str:
        """What a user may do where it does not start."""

    async def start(self) -> None:
        """Return when it can sample.

        Raises:
            ServerError: it cannot, within `start_timeout`; with its own words.
        """
        self.why, self.weights, self.versions, self.adapters = None, None, [], Adapters()
        self.attach()
        seconds = self.backend.settings.start_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._start()
                self.versions = [await self.api.version()]
        except TimeoutError:
            key = f"generator.{self.backend.name}.start_timeout"
            raise ServerError(f"was not ready within {key}={seconds:g} s{self._said()}") from None

    async def until_lost(self, on_answer: Callable[[bool], None]) -> str:
        """Return when it is gone, hangs or was given up, and say why; until then ask now and then whether it is there.

        Args:
            on_answer: told whether it answered.
        """
        misses = 0
        while not await self._ended(LOOK / 2 if misses else LOOK):
            self._doubted.clear()
            misses = 0 if await self._answers() or self._sampled else misses + 1
            self._sampled = False
            if misses == MISSES:
                return f"did not answer {MISSES} times in a row"
            if self.why is None:
                on_answer(misses == 0)
        return self.why or self._how_it_ended()

    def note_turn(self) -> None:
        """It has sampled one."""
        self.failures, self._sampled = 0, True

    def doubt(self) -> None:
        """A turn had no answer: it gets no others before it has shown that it is there."""
        self.lane.serving = False
        self._doubted.set()

    def give_up(self, why: str) -> None:
        """It must not go on as it is."""
        self.lane.serving = False
        self.why = self.why or one_line(why, 2 * WORDS)
        self._given_up.set()

    async def end(self) -> None:
        """See to it that it is gone, or as good as that."""
        if hasattr(self, "api"):
            with suppress(Exception):
                async with asyncio.timeout(LOOK):
                    await self.api.close()

    @abstractmethod
    def kill(self) -> None:
        """Like `end`, at once and where no event loop runs."""

    @abstractmethod
    async def _start(self) -> None:
        """Return when it can sample."""

    async def _ended(self, seconds: float) -> bool:
        """Wait so long, or until it is gone, given up or doubted; whether it is gone or given up."""
        await _first(seconds, self._given_up.wait(), self._doubted.wait())
        return self.why is not None

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(LOOK):
                return await self.api.is_alive()
        except (ServerError, TimeoutError):
            return False

    async def _until_ready(self) -> None:
        pause = FIRST_PAUSE
        while not await self._is_ready():
            if await self._ended(pause):
                raise ServerError(self.why or self._how_it_ended())
            pause = min(1.5 * pause, LONGEST_PAUSE)

    async def _is_ready(self) -> bool:
        try:
            return await self.api.is_ready()
        except ServerError:
            return False

    @abstractmethod
    def _how_it_ended(self) -> str:
        """In words, where it is gone."""

    @abstractmethod
    def _said(self) -> str:
        """Its own words, at the end of a sentence."""


class GivenReplica(Replica):
    """A server that somebody else has started, at a URL. It is not ended here, only left."""

    comes_back = False

    def __init__(self, backend: Backend, url: str):
        super().__init__(backend, f"the server {url}")
        self.url = url

    @property
    def advice(self) -> str:
        name, key = self.backend.name, self.backend.settings.api_key_env
        return (
            f"see that it runs at this address of generator.{name}.urls, and that the environment variable "
            f"generator.{name}.api_key_env={key} holds its token; without urls servers are started here"
        )

    def kill(self) -> None:
        """It is somebody else's."""

    async def _start(self) -> None:
        key = self.backend.settings.api_key_env
        self.api = self.backend.make_api(self.url, os.environ.get(key, "").strip() or None)
        await self._until_ready()

    async def _is_ready(self) -> bool:
        try:
            return await self.api.is_ready()
        except ServerRefusedError:  # such as of our token, which waiting does not mend
            raise
        except ServerError:
            return False

    def _how_it_ended(self) -> str:
        return "is gone"

    def _said(self) -> str:
        return ""


class OwnReplica(Replica):
    """A server that is started here, as a process of this machine."""

    def __init__(self, backend: Backend, index: int, log: Path, devices: Sequence[int] | None):
        super().__init__(backend, f"{backend.name} server {index}")
        self.log, self.devices = log, devices
        self.process: ServerProcess | None = None

    @property
    def advice(self) -> str:
        name, settings = self.backend.name, self.backend.settings
        return (
            f"generator.{name}.args={dict(settings.args)} changes what it is started with, and "
            f"generator.{name}.python={settings.python} by which interpreter"
        )

    async def end(self) -> None:
        await super().end()
        if self.process is not None:
            await asyncio.to_thread(self.process.end)

    def kill(self) -> None:
        if self.process is not None:
            self.process.end(0)

    async def _start(self) -> None:
        for attempt in range(PORTS):
            place = Place(free_port(), secrets.token_urlsafe(24), self.devices)
            self.process = ServerProcess(self.backend.make_command(place), self.log, self.name)
            self.api = self.backend.make_api(f"http://127.0.0.1:{place.port}", place.token)
            try:
                await self._until_ready()
                return
            except ServerError:
                if not self.process.lost_port or attempt == PORTS - 1:
                    raise

    async def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.lost_port:  # SGLang lives on without it
            raise ServerError(self._how_it_ended())
        return await super()._is_ready()

    async def _ended(self, seconds: float) -> bool:
        assert self.process is not None
        await _first(seconds, self._given_up.wait(), self._doubted.wait(), self.process.wait())
        return self.why is not None or not self.process.running

    def _how_it_ended(self) -> str:
        assert self.process is not None
        return f"{self.process.end()}{self._said()}"

    def _said(self) -> str:
        assert self.process is not None
        words = one_line(self.process.last_words(), WORDS)
        return f' and said: "{words}" (all of it is in {self.log})' if words else f" (its log is {self.log})"


async def _first(seconds: float, *events: Awaitable[object]) -> None:
    """Wait for the first of these, or so long."""
    tasks = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
