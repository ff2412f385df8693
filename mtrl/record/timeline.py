"""timeline.jsonl: spans of time that a run spent on its phases."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mtrl.record.metrics import MetricsLog

LANES = {"generate": "generator", "rollout": "generator", "evaluate": "generator"}
"""Lane of each span name; all other spans, including `wait` (for rollouts), belong to the trainer."""


class Timeline:
    """Writes spans `{"step": 3, "name": "generate", "lane": "generator", "start": 12.1, "end": 13.0}`, in seconds since
    the start of the run. The time between a stop and its resumption does not count.

    Each span is one line, written when the span ends. Spans of steps that a resumed run repeats are removed, as in
    metrics.jsonl. Spans may overlap, and any thread may write them.
    """

    def __init__(self, path: Path):
        self._log = MetricsLog(path)
        self._zero = time.perf_counter()
        self._lock = threading.Lock()
        self.on_begin: Callable[[], None] = lambda: None
        """Called before each `with` block."""

    def start(self, step: int, seconds: float) -> None:
        """Continue after `step`, at which the run had taken `seconds`."""
        self._zero = time.perf_counter() - seconds
        with self._lock:
            self._log.truncate(step if step else -1)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return self.since_start(time.perf_counter())

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[TimeSpan]:
        """Record the duration of the block as a span of training step `step` (1-based), also if the block fails."""
        self.on_begin()
        span = TimeSpan(self.seconds)
        try:
            yield span
        finally:
            span.end = self.seconds
            self.record(name, step, span.start, span.end)

    def since_start(self, moment: float) -> float:
        """Convert a time of `time.perf_counter` to seconds since the start of the run."""
        return moment - self._zero

    def record(self, name: str, step: int, start: float, end: float) -> None:
        """Write a span that is not a `with` block; `start` and `end` are values of `seconds`."""
        lane = LANES.get(name, "trainer")
        with self._lock:
            self._log.log(step, {"name": name, "lane": lane, "start": round(start, 6), "end": round(end, 6)})

    def spans(self, since: float = 0.0) -> list[dict[str, object]]:
        """Return the written spans that did not end before `since` (seconds since the start of the run)."""
        with self._lock:
            return [row for row in self._log.read() if row["end"] >= since]

    def close(self) -> None:
        with self._lock:
            self._log.close()


class TimeSpan:
    """One span of time, in seconds since the start of the run."""

    def __init__(self, start: float):
        self.start = self.end = start

    @property
    def seconds(self) -> float:
        return self.end - self.start


def rows(stretches: Sequence[tuple[float, float]]) -> list[int]:
    """Assign a row (from 0) to each `(start, end)`, which are in order of their starts: the first row that is free at
    the start."""
    ends: list[float] = []
    found = []
    for start, end in stretches:
        row = next((row for row, busy in enumerate(ends) if busy <= start), len(ends))
        ends[row : row + 1] = [end]
        found.append(row)
    return found
