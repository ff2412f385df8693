"""timeline.jsonl: what the run was doing when."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtrl.tracking.metrics import MetricsLog

LANES = {"generate": "generator", "evaluate": "generator"}
"""Who does what; everything else is the trainer's."""


class Timeline:
    """Writes spans `{"step": 3, "name": "generate", "lane": "generator", "start": 12.1, "end": 13.0}`, in seconds since
    the start of the run; the time between a stop and its resumption does not count.

    One span, one line; those of steps that a resumed run makes again are forgotten, as in metrics.jsonl.
    """

    def __init__(self, path: Path):
        self._log = MetricsLog(path)
        self._zero = time.perf_counter()

    def start(self, step: int, seconds: float) -> None:
        """Go on after `step`, at which the run had taken `seconds`."""
        self._zero = time.perf_counter() - seconds
        self._log.truncate(step if step else -1)

    @property
    def seconds(self) -> float:
        """Since the start of the run."""
        return time.perf_counter() - self._zero

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[Span]:
        """Time what is done inside for training step `step` (1-based); it counts even where it fails."""
        span = Span(self.seconds)
        try:
            yield span
        finally:
            span.end = self.seconds
            lane = LANES.get(name, "trainer")
            self._log.log(step, {"name": name, "lane": lane, "start": round(span.start, 6), "end": round(span.end, 6)})

    def close(self) -> None:
        self._log.close()


class Span:
    """One stretch of time."""

    def __init__(self, start: float):
        self.start = self.end = start

    @property
    def seconds(self) -> float:
        return self.end - self.start
