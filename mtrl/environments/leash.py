"""Coroutines of strangers: one that ignores its cancellation is dropped, so that no event loop waits for it."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

from mtrl.process_guard import guarded, said


class Leash:
    """Awaits a coroutine, and can let it go.

    An event loop that ends cancels every task and waits for it. After `let_go` the coroutine is cancelled as any other
    is, and may clear up; if it goes on instead, the next cancellation ends the task without asking it. A `SystemExit`
    of it becomes a `RuntimeError`: asyncio would raise it out of the loop, and end the program.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]):
        self._coroutine = coroutine
        self._is_let_go = self._was_told = False

    def let_go(self) -> None:
        """Nobody waits for its result; to be called before the task is cancelled."""
        self._is_let_go = True

    def __await__(self) -> Generator[Any, Any, Any]:
        step = partial(self._coroutine.send, None)
        while True:
            try:
                with guarded():
                    waiting_for = step()
            except StopIteration as end:
                return end.value
            except SystemExit as error:
                raise RuntimeError(said(error, repr)) from error
            try:
                step = partial(self._coroutine.send, (yield waiting_for))
            except BaseException as error:
                if self._drops(error):
                    # Never freed: what is freed is run once more, to be closed, and could go on for ever in that.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._coroutine))
                    raise
                step = partial(self._coroutine.throw, error)

    def _drops(self, error: BaseException) -> bool:
        if not (self._is_let_go and isinstance(error, asyncio.CancelledError)):
            return False
        was_told, self._was_told = self._was_told, True
        return was_told
