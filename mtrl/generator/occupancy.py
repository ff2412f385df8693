"""For how long anything of a kind was going on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Occupancy:
    """How long anybody was inside: `with occupancy:`, by any number of threads or tasks at once.

    Around the sampling of a turn its `seconds` are those in which at least one turn was sampled.
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
        """A running total, what is still going on included."""
        with self._lock:
            return self._total + (self._clock() - self._since if self._inside else 0.0)

    def take(self) -> float:
        """Seconds since this was last asked."""
        seconds = self.seconds
        taken, self._taken = seconds - self._taken, seconds
        return taken
