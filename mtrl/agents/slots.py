"""A limit on concurrency: a task that leaves a slot starts the next task's resource at the same moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Slots(Generic[T]):
    """A semaphore that opens the next task's resource before it closes the resource of the task that leaves.

    The deterministic engine samples as soon as every open trajectory has requested a turn. The set of trajectories that
    run together must therefore not depend on how fast a task wakes up.
    """

    def __init__(self, count: int):
        self._free = count
        self._waiting: deque[tuple[Callable[[], T], asyncio.Future[T]]] = deque()

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self._free

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, begin: Callable[[], T], end: Callable[[T], Any]) -> AsyncIterator[T]:
        """Wait for a slot, first come, first served, and yield the value that `begin` then returns. On exit, call `end`
        with that value."""
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
            # The slot was granted at the same moment as the cancellation.
            if future.done() and not future.cancelled() and future.exception() is None:
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
        """Give the slot to the first task that still waits. If its `begin` fails, that task gets the exception, and the
        slot goes to the task after it."""
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
