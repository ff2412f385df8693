"""Threads for synchronous environments. A call that hangs is abandoned, and delays neither the run nor its exit."""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from mtrl.environments.detachable_task import DetachableTask
from mtrl.utils.process_guard import CallTimeoutError, guarded, safe_text


class EnvironmentPool:
    """Runs blocking calls with a time limit on daemon threads."""

    def __init__(self, workers: int):
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = workers
        self._final_calls: set[asyncio.Future[None]] = set()
        for _ in range(workers):
            self._start_worker()

    async def call(
        self, function: Callable[..., Any], *args: Any, timeout: float, discard: Callable[[Any], Any] | None = None
    ) -> Any:
        """Return the result of `function(*args)`, which is awaited if it is async.

        The time limit counts from the start of the call, not from the wait for a free thread. `discard` is called with
        a result that arrives after the caller has stopped waiting.

        Raises:
            CallTimeoutError: the call took longer than `timeout` seconds; its thread is replaced.
        """
        if inspect.iscoroutinefunction(function):
            return await _within(function(*args), function, timeout)
        return await self._on_thread(_Call(function, args, discard), timeout)

    async def finish(self, function: Callable[[], Any], *, timeout: float) -> None:
        """Like `call(function)`, but the call is made even if the caller is cancelled before it begins.

        Raises:
            CallTimeoutError: the call took longer than `timeout` seconds; its thread is replaced.
        """
        call = asyncio.ensure_future(self._finish(function, timeout))
        self._final_calls.add(call)
        call.add_done_callback(self._final_calls.discard)
        await asyncio.shield(call)

    def close(self) -> None:
        """Let the idle threads end."""
        for _ in range(self._workers):
            self._calls.put(None)

    async def _finish(self, function: Callable[[], Any], timeout: float) -> None:
        if inspect.iscoroutinefunction(function):
            await _within(function(), function, timeout)
        else:  # a thread makes the call even if this event loop ends first
            await self._on_thread(_FinalCall(function, (), _await), timeout)

    async def _on_thread(self, call: _Call, timeout: float) -> Any:
        self._calls.put(call)
        try:
            await call.started
            result = await _within(call.result, call.function, timeout)
        except (CallTimeoutError, asyncio.CancelledError):
            if call.abandon():
                self._start_worker()  # the thread of the abandoned call takes no other calls
            raise
        return await _within(result, call.function, timeout) if inspect.isawaitable(result) else result

    def _start_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="mtrl-environment").start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.run():
                return  # it was replaced while it hung


async def _within(awaitable: Any, function: Callable[..., Any], timeout: float) -> Any:
    """Return the awaitable's result. After `timeout` seconds it is cancelled and abandoned, even if it ignores that."""
    task = DetachableTask(awaitable) if inspect.iscoroutine(awaitable) else None
    future = asyncio.ensure_future(task or awaitable)
    try:
        await asyncio.wait({future}, timeout=timeout)
    finally:
        late = not future.done()
        if late:
            if task is not None:
                task.detach()
            future.cancel()
    if late:
        raise CallTimeoutError(f"{_name(function)} took longer than environment.step_timeout={timeout} s")
    if future.cancelled():  # by the environment; a `CancelledError` would look like a cancelled episode
        raise RuntimeError(f"{_name(function)} cancelled itself")
    return future.result()


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function, for error messages only: the `repr` of a `partial` contains all its arguments."""
    return getattr(function, "__qualname__", None) or repr(function)


class _Call:
    """One call. The waiting coroutine is responsible for its result until `abandon`, and then its thread alone."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], discard: Callable[[Any], Any] | None):
        self.function, self.args, self.discard = function, args, discard
        self.loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self.loop.create_future()
        self.result: asyncio.Future[Any] = self.loop.create_future()
        # An error that arrives while the caller is cancelled has no reader, and asyncio would write its traceback.
        self.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._lock = threading.Lock()
        self._abandoned = self._running = self._replaced = False
        self._results: list[Any] = []
        """List with the returned value; empty while there is none."""

    def abandon(self) -> bool:
        """Stop waiting for the call. Return True if a thread is running it, which is then lost to other calls."""
        with self._lock:
            self._abandoned, self._replaced = True, self._running
            results = self._results
        if results and self.discard:  # the result arrived at the same moment
            threading.Thread(target=self.discard, args=results, daemon=True).start()
        return self._replaced

    def run(self) -> bool:
        """Make the call on this thread. Return False if the thread was replaced meanwhile."""
        if not self._begin():
            return True
        self._deliver(self.started, None, None)
        value, error = None, None
        try:
            with guarded():
                value = self.function(*self.args)
        except BaseException as caught:  # an environment's SystemExit must not end a worker silently
            error = caught
        if self._end([] if error else [value]):
            self._deliver(self.result, value, error)
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
        """Store the result. Return False if the call was abandoned."""
        with self._lock:
            self._running, self._results = False, results
            return not self._abandoned

    def _deliver(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            self.loop.call_soon_threadsafe(_settle, future, value, error)


class _FinalCall(_Call):
    """A call that a thread makes even if it was abandoned before."""

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
        wrapped = RuntimeError(safe_text(error, repr))
        wrapped.__cause__ = error
        future.set_exception(wrapped)
