"""Protection of the process from an environment's code, which must not end it, delay its end, or stop its event loop.

`os._exit` ends a process without an exception and with any status, including 0, so that a run that was cut off would
look like a success. Within `guarded` it raises `SystemExit` instead, which fails the episode. Threads, tasks and
callbacks that are started within `guarded` are guarded too, and such threads are daemons, so they end with the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn

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
def failing_alone() -> Iterator[None]:
    """Like `guarded`, for methods of an environment's values: a `SystemExit`, with which asyncio would end the
    program, becomes a RuntimeError."""
    try:
        with guarded():
            yield
    except SystemExit as error:
        raise RuntimeError(repr(error)) from error


def said(error: BaseException, show: Callable[[BaseException], str] = str) -> str:
    """Return `show(error)`, by default `str(error)`, or a substitute text if that raises. An environment may have
    defined the class of the error, so its `__str__` may fail."""
    try:
        with guarded():
            return show(error)
    except BaseException as failure:
        return f"{type(error).__name__}, which cannot be shown: its text raised {type(failure).__name__}"


def _exit_unless_guarded(status: int) -> NoReturn:
    if _guard.get()[0] == os.getpid():
        raise SystemExit(f"os._exit({status}) in an environment")
    _exit(status)


def _stop_unless_guarded(loop: asyncio.BaseEventLoop) -> None:
    if _guard.get()[1] is loop:
        raise RuntimeError("an environment may not stop the event loop that it is played on")
    _stop(loop)


def _start_as_guarded(thread: threading.Thread) -> None:
    if _guard.get()[0] == os.getpid():
        thread.daemon = True
        thread.run = partial(copy_context().run, thread.run)  # type: ignore[method-assign]
    _start(thread)


os._exit = _exit_unless_guarded
asyncio.BaseEventLoop.stop = _stop_unless_guarded  # type: ignore[method-assign, assignment]
threading.Thread.start = _start_as_guarded  # type: ignore[method-assign, assignment]
