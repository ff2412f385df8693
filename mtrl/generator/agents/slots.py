"""So many at once: whoever leaves lets the next one in at the same moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """A semaphore that opens what the next one needs before it gives back what the last one had.

    The deterministic engine goes on as soon as everybody whom it knows has asked: who plays beside whom must not depend
    on how fast a task wakes up.
    """

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[tuple[Callable[[], T], asyncio.Future[T]]] = deque()

    @asynccontextmanager
    async def take(self, begin: Callable[[], T], end: Callable[[T], Any]) -> AsyncIterator[T]:
        """What `begin` returns, called when it is this one's turn; then `end` is given it. First come, first served."""
        value = await self._enter(begin, end)
        try:
            yield value
        finally:
            self._leave(value, end)

    async def _enter(self, begin: Callable[[], T], end: Callable[[T], Any]) -> T:
        if self._free:
            self._free -= 1
            try:
                return begin()
            except BaseException:
                self._next()
                raise
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((begin, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:  # it came at the same moment
                self._leave(future.result(), end)
            with suppress(ValueError):
                self._waiting.remove((begin, future))
            raise

    def _leave(self, value: T, end: Callable[[T], Any]) -> None:
        try:
            self._next()
        finally:
            end(value)

    def _next(self) -> None:
        """Let the first one in that still waits; if its `begin` fails, it is told so, and the one after it is next."""
        while self._waiting:
            begin, future = self._waiting.popleft()
            if future.done():
                continue
            try:
                future.set_result(begin())
                return
            except Exception as error:
                future.set_exception(error)
        self._free += 1
