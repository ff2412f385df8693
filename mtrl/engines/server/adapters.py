"""The LoRA adapters that a server holds, one per policy version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mtrl.engines.server.server_api import ServerApi, ServerError

SETTLING_SECONDS = 0.05
"""Seconds between two looks for turns of older adapters."""


@dataclass(frozen=True)
class ServedAdapter:
    """The adapter that samples as policy `version`."""

    name: str
    version: int


class Adapters:
    """The loaded adapters of one server. New turns are sampled by the newest adapter, turns in flight by the one that
    they began with. An older adapter is dropped when no turn uses it any more."""

    def __init__(self) -> None:
        self.newest: ServedAdapter | None = None
        self._loaded: list[ServedAdapter] = []
        self._turns: Counter[ServedAdapter] = Counter()
        self._dropping: set[asyncio.Task[None]] = set()

    def add(self, adapter: ServedAdapter, server: ServerApi) -> None:
        """Record a loaded adapter as the newest one, and drop unused older ones."""
        self.newest = adapter
        if adapter not in self._loaded:
            self._loaded.append(adapter)
        self._drop_unused(server)

    @contextmanager
    def sampling(self, server: ServerApi) -> Iterator[ServedAdapter | None]:
        """Context of one turn in flight. It yields the adapter that samples the turn; None for the model itself."""
        adapter = self.newest
        if adapter is None:
            yield None
            return
        self._turns[adapter] += 1
        try:
            yield adapter
        finally:
            self._turns[adapter] -= 1
            self._drop_unused(server)

    async def settle(self) -> None:
        """Return when every turn in flight that another adapter than the present newest one samples has ended."""
        older = [one for one in self._turns if one != self.newest]
        while any(self._turns[one] for one in older):
            await asyncio.sleep(SETTLING_SECONDS)

    def _drop_unused(self, server: ServerApi) -> None:
        for adapter in [one for one in self._loaded if one != self.newest and not self._turns[one]]:
            self._loaded.remove(adapter)
            task = asyncio.get_running_loop().create_task(_drop(server, adapter.name))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)


async def _drop(server: ServerApi, name: str) -> None:
    with suppress(ServerError):  # an unused adapter only takes memory, and a server that needs it drops it by itself
        await server.drop_adapter(name)
