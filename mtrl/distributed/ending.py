"""How a rank ends once the job is lost, whatever its main thread is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

from mtrl.errors import JobLost

GRACE = 20.0
"""Seconds that the leader has to end in order; torchrun kills after 30."""


class Departure:
    """A follower holds nothing that wants care: it says why and ends at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def __call__(self, reason: str) -> None:
        end_process(JobLost(self.rank, self.size, reason))

    def close(self) -> None:
        """Nothing to undo."""


class Unwinding:
    """The leader raises `JobLost` in its main thread, so that engines and trackers are closed, and ends later if stuck.

    A signal to itself brings the exception there even while it waits for rollouts, which may take long.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._error: JobLost | None = None
        self._previous: Any = None
        self._has_handler = threading.current_thread() is threading.main_thread()
        if self._has_handler:
            self._previous = signal.signal(signal.SIGUSR2, self._raise)

    def __call__(self, reason: str) -> None:
        self._error = JobLost(self.rank, self.size, reason)
        last = threading.Timer(GRACE if self._has_handler else 0.0, end_process, [self._error])
        last.daemon = True
        last.start()
        if self._has_handler:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    def close(self) -> None:
        """Give the signal back."""
        if self._has_handler:
            self._has_handler = False
            signal.signal(signal.SIGUSR2, self._previous)

    def _raise(self, *_: object) -> None:
        if self._error is not None:
            raise self._error


def end_process(error: JobLost) -> NoReturn:
    """Say it and end now, from any thread; nothing of the interpreter is torn down under threads that still wait."""
    try:
        sys.stdout.flush()
        print(error, file=sys.stderr, flush=True)
    finally:  # also where nobody reads that any more
        os._exit(1)
