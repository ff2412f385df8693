"""Simulated time, which jumps from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Makes calls in the order of their times, and calls with the same time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """Simulated time in seconds."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call `seconds` seconds from now.

        Raises:
            ValueError: `seconds` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"{seconds} seconds from now is in the past")
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self, until: Callable[[], bool]) -> None:
        """Make calls until `until` is true.

        Raises:
            RuntimeError: no call is left, and `until` is false.
        """
        while not until():
            if not self._due:
                raise RuntimeError(f"nothing happens any more after {self.now:.1f} s")
            self.now, _, call = heapq.heappop(self._due)
            call()
