"""timeline.jsonl: what the run was doing when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mtrl.tracking.metrics import MetricsLog

LANES = {"generate": "generator", "rollout": "generator", "evaluate": "generator"}
"""Who does what; everything else is the trainer's, `wait` (for rollouts) too."""


class Timeline:
    """Writes spans `{"step": 3, "name": "generate", "lane": "generator", "start": 12.1, "end": 13.0}`, in seconds since
    the start of the run; the time between a stop and its resumption does not count.

    One span, one line, written when it ends; those of steps that a resumed run makes again are forgotten, as in
    metrics.jsonl. Spans may overlap, and come from any thread.
    """

    def __init__(self, path: Path):
        self._log = MetricsLog(path)
        self._zero = time.perf_counter()
        self._lock = threading.Lock()
        self.on_begin: Callable[[], None] = lambda: None
        """Called before each `with` block."""

    def start(self, step: int, seconds: float) -> None:
        """Go on after `step`, at which the run had taken `seconds`."""
        self._zero = time.perf_counter() - seconds
        with self._lock:
            self._log.truncate(step if step else -1)

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return self.since_start(time.perf_counter())

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[Span]:
        """Time what is done inside for training step `step` (1-based); it counts even where it fails."""
        self.on_begin()
        span = Span(self.seconds)
        try:
            yield span
        finally:
            span.end = self.seconds
            self.record(name, step, span.start, span.end)

    def since_start(self, moment: float) -> float:
        """A moment of `time.perf_counter` in seconds since the start of the run."""
        return moment - self._zero

    def record(self, name: str, step: int, start: float, end: float) -> None:
        """Write a span that is no `with` block; `start` and `end` were read from `seconds`."""
        lane = LANES.get(name, "trainer")
        with self._lock:
            self._log.log(step, {"name": name, "lane": lane, "start": round(start, 6), "end": round(end, 6)})

    def spans(self, since: float = 0.0) -> list[dict[str, object]]:
        """What was written and did not end before `since`."""
        with self._lock:
            return [row for row in self._log.read() if row["end"] >= since]

    def close(self) -> None:
        with self._lock:
            self._log.close()


class Span:
    """One stretch of time."""

    def __init__(self, start: float):
        self.start = self.end = start

    @property
    def seconds(self) -> float:
        return self.end - self.start


def rows(stretches: Sequence[tuple[float, float]]) -> list[int]:
    """A row, from 0, for each `(start, end)`, in order of their starts: the first one that is free by then."""
    ends: list[float] = []
    found = []
    for start, end in stretches:
        row = next((row for row, busy in enumerate(ends) if busy <= start), len(ends))
        ends[row : row + 1] = [end]
        found.append(row)
    return found
