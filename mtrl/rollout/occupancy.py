"""A clock for the time in which at least one activity of a kind was in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Occupancy:
    """Measures the time in which at least one thread or task was inside `with occupancy:`.

    Any number of threads or tasks may be inside at once. Around the sampling of turns, `seconds` is the time in which
    at least one turn was being sampled.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._lock = clock, threading.Lock()
        self._inside, self._since, self._total, self._taken = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> Occupancy:
        with self._lock:
            if not self._inside:
                self._since = self._clock()
            self._inside += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._total += self._clock() - self._since

    @property
    def seconds(self) -> float:
        """Running total in seconds, including an interval that is still open."""
        with self._lock:
            return self._total + (self._clock() - self._since if self._inside else 0.0)

    def take(self) -> float:
        """Return the seconds that were added since the last call of `take`."""
        seconds = self.seconds
        taken, self._taken = seconds - self._taken, seconds
        return taken
