"""The adapters (LoRA) that a server holds, one per policy version."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from mtrl.generator.engines.server.api import ServerApi, ServerError


@dataclass(frozen=True)
class Adapter:
    """What samples policy `version`."""

    name: str
    version: int


class Adapters:
    """New turns are sampled by the newest one, those on their way by the one that they began with; whichever is older
    and samples nothing any more is dropped."""

    def __init__(self) -> None:
        self.newest: Adapter | None = None
        self._loaded: list[Adapter] = []
        self._turns: Counter[Adapter] = Counter()
        self._dropping: set[asyncio.Task[None]] = set()

    def add(self, adapter: Adapter, server: ServerApi) -> None:
        """It is loaded, and the newest."""
        self.newest = adapter
        if adapter not in self._loaded:
            self._loaded.append(adapter)
        self._drop_unused(server)

    @contextmanager
    def sampling(self, server: ServerApi) -> Iterator[Adapter | None]:
        """While a turn is on its way; gives what samples it, None for the model itself."""
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

    def _drop_unused(self, server: ServerApi) -> None:
        for adapter in [one for one in self._loaded if one != self.newest and not self._turns[one]]:
            self._loaded.remove(adapter)
            task = asyncio.get_running_loop().create_task(_drop(server, adapter.name))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)


async def _drop(server: ServerApi, name: str) -> None:
    with suppress(ServerError):  # it takes memory, and a server that needs it drops it by itself
        await server.drop_adapter(name)
