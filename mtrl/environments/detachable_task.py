"""Foreign coroutines: one that ignores its cancellation is abandoned, so that no event loop waits for it."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine, Generator
from functools import partial
from typing import Any

from mtrl.utils.process_guard import guarded, safe_text


class DetachableTask:
    """Awaits a coroutine, and can abandon it.

    An event loop that ends cancels every task and waits for it. After `detach`, the first cancellation reaches the
    coroutine as usual, so that it can clean up. If it continues instead, the next cancellation ends the task without
    it. A `SystemExit` of the coroutine becomes a `RuntimeError`, because asyncio would raise it out of the loop and end
    the program.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]):
        self._coroutine = coroutine
        self._is_detached = self._was_cancelled = False

    def detach(self) -> None:
        """Abandon the coroutine, whose result is no longer needed; it must be called before the task is cancelled."""
        self._is_detached = True

    def __await__(self) -> Generator[Any, Any, Any]:
        step = partial(self._coroutine.send, None)
        while True:
            try:
                with guarded():
                    waiting_for = step()
            except StopIteration as end:
                return end.value
            except SystemExit as error:
                raise RuntimeError(safe_text(error, repr)) from error
            try:
                step = partial(self._coroutine.send, (yield waiting_for))
            except BaseException as error:
                if self._drops(error):
                    # The coroutine is never freed: freeing it would close it, which runs it again, perhaps for ever.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._coroutine))
                    raise
                step = partial(self._coroutine.throw, error)

    def _drops(self, error: BaseException) -> bool:
        if not (self._is_detached and isinstance(error, asyncio.CancelledError)):
            return False
        was_cancelled, self._was_cancelled = self._was_cancelled, True
        return was_cancelled
