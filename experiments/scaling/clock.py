"""Time that passes only from one event to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """Calls back in order of time; what is due at the same moment, in order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """
        Raises:
            ValueError: that would be in the past.
        """
        if not seconds >= 0:
            raise ValueError(f"{seconds} seconds from now is no time to come")
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until that holds.

        Raises:
            RuntimeError: nothing is due any more, and it does not.
        """
        while not until():
            if not self._due:
                raise RuntimeError(f"nothing happens any more after {self.now:.1f} s")
            self.now, _, call = heapq.heappop(self._due)
            call()
