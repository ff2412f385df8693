"""The tracker: one `log(step, metrics)` for all backends that record a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol


class MetricsDestination(Protocol):
    """Destination that records metrics: the metrics log, the console, MLflow, W&B."""

    name: str

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Passes metrics to every backend. A backend that fails loses its own record and causes a warning, but never ends
    the run."""

    def __init__(self, backends: Sequence[MetricsDestination], warn: Callable[[str], Any]):
        self.backends = list(backends)
        self.failures: Counter[str] = Counter()
        """Number of failed calls by backend name."""
        self._warn = warn

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one step."""
        for backend in self.backends:
            self._try(backend, partial(backend.log, step, dict(metrics)))

    def close(self) -> None:
        """Close every backend, and warn how many calls failed."""
        for backend in self.backends:
            self._try(backend, backend.close)
        for name, count in self.failures.items():
            if count > 1:
                self._report(f"{name} failed {count} times in this run")

    def _try(self, backend: MetricsDestination, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self.failures[backend.name] += 1
            if self.failures[backend.name] == 1:
                self._report(f"{backend.name} failed and the run continues without it: {type(error).__name__}: {error}")

    def _report(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:  # the console itself may fail
            self.failures["warn"] += 1
