"""What code of an environment may not do to the process: end it, or stop the event loop that the run plays on.

`os._exit` ends a process without an exception and with any status, 0 too, so that a run of which nothing is left would
look like one that has succeeded. Within `guarded` it raises `SystemExit` instead, which fails the episode.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class _Guard(threading.local):
    process: int | None = None
    """Within `guarded`: the process, which a child that was forked there is not."""
    loop: Any = None
    """Within `guarded`: the event loop that runs on this thread."""


_guard = _Guard()
_exit = os._exit
_stop = asyncio.BaseEventLoop.stop


@contextmanager
def guarded() -> Iterator[None]:
    """On this thread, until it is left: `os._exit` raises SystemExit, `stop` of the running loop a RuntimeError."""
    before = _guard.process, _guard.loop
    _guard.process, _guard.loop = os.getpid(), asyncio._get_running_loop()
    try:
        yield
    finally:
        _guard.process, _guard.loop = before


def _exit_unless_guarded(status: int) -> NoReturn:
    if _guard.process == os.getpid():
        raise SystemExit(f"os._exit({status}) in an environment")
    _exit(status)


def _stop_unless_guarded(loop: asyncio.BaseEventLoop) -> None:
    if _guard.loop is loop:
        raise RuntimeError("an environment may not stop the event loop that it is played on")
    _stop(loop)


os._exit = _exit_unless_guarded
asyncio.BaseEventLoop.stop = _stop_unless_guarded  # type: ignore[method-assign, assignment]
