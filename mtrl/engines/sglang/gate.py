"""A gate that delays turns on the trainer's side while a server is paused, and counts the turns inside."""

from __future__ import annotations

import asyncio


class TurnGate:
    """A gate for turns, open at first. It is bound to an event loop only while a turn waits at it."""

    def __init__(self) -> None:
        self.inside = 0
        """Number of turns that have entered and not left."""
        self._opened: asyncio.Event | None = None
        """Event that is set when the gate opens; None while it is open."""
        self._emptied: asyncio.Event | None = None

    @property
    def is_open(self) -> bool:
        return self._opened is None

    async def opened(self) -> None:
        """Wait until the gate is open."""
        while self._opened is not None:
            await self._opened.wait()

    async def emptied(self) -> None:
        """Wait until no turn is inside."""
        while self.inside:
            self._emptied = self._emptied or asyncio.Event()
            await self._emptied.wait()

    async def enter(self) -> None:
        """Wait until the gate is open, and enter; the caller must call `leave` afterwards."""
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
