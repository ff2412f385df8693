"""Protection of the process from an environment's code, which must not end it, delay its end, or stop its event loop.

`os._exit` ends a process without an exception and with any status, including 0, so that a run that was cut off would
look like a success. Within `guarded` it raises `SystemExit` instead, which fails the episode. Threads, tasks and
callbacks that are started within `guarded` are guarded too, and such threads are daemons, so they end with the process.

`import_guarded` and `in_time` protect against other code of the user: the import of a module, and a call with a time
limit.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from types import ModuleType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class CallTimeoutError(TimeoutError):
    """A call took longer than its time limit (an environment's own `TimeoutError` is not this)."""


_guard: ContextVar[tuple[int | None, Any]] = ContextVar("_guard", default=(None, None))
"""Id of the guarded process and its running event loop, set within `guarded`. The id distinguishes the process from a
child that was forked within `guarded`, which may exit."""
_exit = os._exit
_stop = asyncio.BaseEventLoop.stop
_start = threading.Thread.start


@contextmanager
def guarded() -> Iterator[None]:
    """Within this context, `os._exit` raises SystemExit and `stop` of the running event loop raises RuntimeError. The
    recursion limit is restored at the end."""
    before, depth = _guard.get(), sys.getrecursionlimit()
    _guard.set((os.getpid(), asyncio._get_running_loop()))
    try:
        yield
    finally:
        _guard.set(before)
        if sys.getrecursionlimit() != depth:
            sys.setrecursionlimit(depth)


@contextmanager
def exit_as_error() -> Iterator[None]:
    """Like `guarded`, for methods of an environment's values: a `SystemExit`, with which asyncio would end the
    program, becomes a RuntimeError."""
    try:
        with guarded():
            yield
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error


def import_guarded(module: str) -> ModuleType:
    """Import a user's module within `guarded`. A recursion limit that the module sets remains in effect.

    Raises:
        RuntimeError: the module ends the program; the traceback is that of the module's `SystemExit`.
    """
    depth = sys.getrecursionlimit()
    try:
        with guarded():
            found = importlib.import_module(module)
            depth = sys.getrecursionlimit()
    except SystemExit as error:
        raise RuntimeError(f"its import ends the program by {error!r}").with_traceback(error.__traceback__) from error
    sys.setrecursionlimit(depth)
    return found


def in_time(call: Callable[[], T], seconds: float) -> T:
    """Return the result of a call on a guarded daemon thread, so that a call that hangs delays neither its caller nor
    the exit.

    Raises:
        CallTimeoutError: the call has no result within `seconds`.
    """
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def make() -> None:
        try:
            with guarded():
                value = call()
        except BaseException as error:
            results.put((None, error))
        else:
            results.put((value, None))

    threading.Thread(target=make, daemon=True, name="mtrl-call").start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise CallTimeoutError(f"it took longer than {seconds:g} s") from None
    if error is not None:
        raise error
    return value


def safe_text(value: object, show: Callable[[Any], str] = str) -> str:
    """Return `show(value)`, by default `str(value)`, or a substitute text if that raises. The class of the value may be
    the user's, so its `__str__` may fail."""
    try:
        with guarded():
            return show(value)
    except BaseException as failure:
        return f"{type(value).__name__}, which cannot be shown: its text raised {type(failure).__name__}"


def _exit_unless_guarded(status: int) -> NoReturn:
    if _guard.get()[0] == os.getpid():
        raise SystemExit(f"os._exit({status}) in an environment")
    _exit(status)


def _stop_unless_guarded(loop: asyncio.BaseEventLoop) -> None:
    if _guard.get()[1] is loop:
        raise RuntimeError("an environment may not stop the event loop that it runs on")
    _stop(loop)


def _start_as_guarded(thread: threading.Thread) -> None:
    if _guard.get()[0] == os.getpid():
        thread.daemon = True
        thread.run = partial(copy_context().run, thread.run)  # type: ignore[method-assign]
    _start(thread)


os._exit = _exit_unless_guarded
asyncio.BaseEventLoop.stop = _stop_unless_guarded  # type: ignore[method-assign, assignment]
threading.Thread.start = _start_as_guarded  # type: ignore[method-assign, assignment]
