"""Threads for synchronous environments: a call that hangs is left behind, and never holds up the run or its exit."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mtrl.environments.leash import Leash
from mtrl.process_guard import CallTimeoutError, guarded, said


class EnvironmentPool:
    """Runs blocking calls with a time limit on daemon threads."""

    def __init__(self, workers: int):
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = workers
        self._last: set[asyncio.Future[None]] = set()
        for _ in range(workers):
            self._start_worker()

    async def call(
        self, function: Callable[..., Any], *args: Any, timeout: float, discard: Callable[[Any], Any] | None = None
    ) -> Any:
        """`function(*args)`, awaited if it is async. Its time runs from its start, not while all threads are busy.

        `discard` is given a result that comes when nobody waits for it any more.

        Raises:
            CallTimeoutError: it took longer than `timeout` seconds; its thread is replaced.
        """
        if inspect.iscoroutinefunction(function):
            return await _within(function(*args), function, timeout)
        return await self._on_thread(_Call(function, args, discard), timeout)

    async def finish(self, function: Callable[[], Any], *, timeout: float) -> None:
        """`call(function)`, made for certain: also where whoever waits for it is cancelled before it begins.

        Raises:
            CallTimeoutError: it took longer than `timeout` seconds; its thread is replaced.
        """
        last = asyncio.ensure_future(self._finish(function, timeout))
        self._last.add(last)
        last.add_done_callback(self._last.discard)
        await asyncio.shield(last)

    def close(self) -> None:
        """Let the idle threads end."""
        for _ in range(self._workers):
            self._calls.put(None)

    async def _finish(self, function: Callable[[], Any], timeout: float) -> None:
        if inspect.iscoroutinefunction(function):
            await _within(function(), function, timeout)
        else:  # a thread makes it even if this loop ends first
            await self._on_thread(_LastCall(function, (), _await), timeout)

    async def _on_thread(self, call: _Call, timeout: float) -> Any:
        self._calls.put(call)
        try:
            await call.started
            result = await _within(call.result, call.function, timeout)
        except (CallTimeoutError, asyncio.CancelledError):
            if call.abandon():
                self._start_worker()  # its thread serves nobody any more
            raise
        return await _within(result, call.function, timeout) if inspect.isawaitable(result) else result

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="mtrl-environment").start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.run():
                return  # it was replaced while it hung


async def _within(awaitable: Any, function: Callable[..., Any], timeout: float) -> Any:
    """The awaitable's result; whatever is late is cancelled and left behind, even if it ignores that."""
    leash = Leash(awaitable) if inspect.iscoroutine(awaitable) else None
    future = asyncio.ensure_future(leash or awaitable)
    try:
        await asyncio.wait({future}, timeout=timeout)
    finally:
        late = not future.done()
        if late:
            if leash is not None:
                leash.let_go()
            future.cancel()
    if late:
        raise CallTimeoutError(f"{_name(function)} took longer than environment.step_timeout={timeout} s")
    if future.cancelled():  # by the environment: it must not look as if the episode were cancelled
        raise RuntimeError(f"{_name(function)} cancelled itself")
    return future.result()


def _name(function: Callable[..., Any]) -> str:
    """Asked for only where something went wrong: the `repr` of a `partial` holds all of its arguments."""
    return getattr(function, "__qualname__", None) or repr(function)


class _Call:
    """One call, and who is responsible for it: the waiting coroutine until `abandon`, then its thread alone."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], discard: Callable[[Any], Any] | None):
        self.function, self.args, self.discard = function, args, discard
        self.loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self.loop.create_future()
        self.result: asyncio.Future[Any] = self.loop.create_future()
        self._lock = threading.Lock()
        self._abandoned = self._running = self._replaced = False
        self._results: list[Any] = []
        """The value, once there is one."""

    def abandon(self) -> bool:
        """Nobody waits any more. True if a thread is running it and is lost to others."""
        with self._lock:
            self._abandoned, self._replaced = True, self._running
            results = self._results
        if results and self.discard:  # it came at the same moment
            threading.Thread(target=self.discard, args=results, daemon=True).start()
        return self._replaced

    def run(self) -> bool:
        """Make the call on this thread. False if the thread was replaced meanwhile."""
        if not self._begin():
            return True
        self._tell(self.started, None, None)
        value, error = None, None
        try:
            with guarded():
                value = self.function(*self.args)
        except BaseException as caught:  # an environment's SystemExit must not end a worker silently
            error = caught
        if self._end([] if error else [value]):
            self._tell(self.result, value, error)
            return True
        if error is None and self.discard:
            with guarded():
                self.discard(value)
        return not self._replaced

    def _begin(self) -> bool:
        with self._lock:
            self._running = not self._abandoned
            return self._running

    def _end(self, results: list[Any]) -> bool:
        """False if nobody waits any more."""
        with self._lock:
            self._running, self._results = False, results
            return not self._abandoned

    def _tell(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(_settle, future, value, error)


class _LastCall(_Call):
    """A call that a thread makes also when it was abandoned before."""

    def _begin(self) -> bool:
        with self._lock:
            self._running = True
        return True


def _await(result: Any) -> None:
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


async def _awaited(result: Awaitable[Any]) -> None:
    await result


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no future accepts
        future.set_exception(error)
    else:
        wrapped = RuntimeError(said(error, repr))
        wrapped.__cause__ = error
        future.set_exception(wrapped)
