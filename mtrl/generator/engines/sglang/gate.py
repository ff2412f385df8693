"""Holds turns back on the trainer's side while a server is paused, and knows when the last one has left."""

from __future__ import annotations

import asyncio


class Gate:
    """Open at first. It belongs to no event loop while nobody waits at it."""

    def __init__(self) -> None:
        self.inside = 0
        """Turns that went through and have not left."""
        self._opened: asyncio.Event | None = None
        """Set when it opens; None: it is open."""
        self._emptied: asyncio.Event | None = None

    @property
    def is_open(self) -> bool:
        return self._opened is None

    async def opened(self) -> None:
        """Return when it is open."""
        while self._opened is not None:
            await self._opened.wait()

    async def emptied(self) -> None:
        """Return when nobody is inside."""
        while self.inside:
            self._emptied = self._emptied or asyncio.Event()
            await self._emptied.wait()

    async def enter(self) -> None:
        """Wait until it is open; then `leave` is due."""
        await self.opened()
        self.inside += 1

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside and self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    def shut(self) -> None:
        self._opened = self._opened or asyncio.Event()

    def open(self) -> None:
        if self._opened is not None:
            self._opened.set()
            self._opened = None
