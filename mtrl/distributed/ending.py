"""End of a rank after the job is lost, independent of the state of its main thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

from mtrl.errors import JobLost

GRACE = 20.0
"""Time for the leader's cleanup, in seconds; torchrun kills the process after 30 s."""


class Departure:
    """End of a follower, which needs no cleanup: it prints the reason and ends at once."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def __call__(self, reason: str) -> None:
        end_process(JobLost(self.rank, self.size, reason))

    def close(self) -> None:
        """Do nothing, since there is nothing to undo."""


class Unwinding:
    """End of the leader: it raises `JobLost` in its main thread, so that engines and trackers are closed. If the main
    thread is stuck, the process ends after `GRACE` seconds.

    A signal to itself raises the exception there, even while the main thread waits for rollouts.
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
        """Restore the previous signal handler."""
        if self._has_handler:
            self._has_handler = False
            signal.signal(signal.SIGUSR2, self._previous)

    def _raise(self, *_: object) -> None:
        if self._error is not None:
            raise self._error


def end_process(error: JobLost) -> NoReturn:
    """Print the error and end the process at once, from any thread. The interpreter is not torn down, since other
    threads may still be waiting."""
    try:
        sys.stdout.flush()
        print(error, file=sys.stderr, flush=True)
    finally:  # also if stderr is closed
        os._exit(1)
