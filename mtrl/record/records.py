"""The objects of a JSONL file that a run may be writing, and the checks of the rows of each such file."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.record.growing import GrowingFile
from mtrl.record.metrics import unfinished, warn_on_stderr
from mtrl.record.reading import Foreign, state_of

Record = dict[str, Any]

LARGEST = 512 * 2**20
"""Maximum size of a file that is read, in bytes."""
LARGEST_NUMBER = 2**53
"""Upper bound of the magnitude of a step or a time, for the axes of plots."""
MOST_PROBLEMS = 5


class Records:
    """The objects of a JSONL file, in order.

    A half-written last line counts once it has its line end. Until then it is left out and reported in `problems`, as
    are lines that are not objects. A resumed run cuts its files, and then the whole file is read again.
    """

    def __init__(self, path: Path, accept: Callable[[Record], bool] = lambda record: True):
        self.path = path
        self.accept = accept
        """Returns whether an object is a record of this file."""
        self.rows: list[Record] = []
        self.state = ""
        """Text that changes when the file changes."""
        self._file = GrowingFile(path)
        self._bad: list[int] = []
        self._foreign: list[str] = []
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """Sentences about unreadable lines, a last line without a line end, and a file that is left out."""
        last = [unfinished(self.path.name, self._file.lines + 1)] if self._file.is_unfinished else []
        if not self._bad:
            return [*self._foreign, *last]
        shown = ", ".join(map(str, self._bad[:MOST_PROBLEMS])) + (" …" if len(self._bad) > MOST_PROBLEMS else "")
        return [f"{self.path.name}: {len(self._bad)} lines cannot be read ({shown})", *last]

    def refresh(self) -> list[Record]:
        """Read the new lines, and return all rows. A missing file has no rows."""
        with self._lock:
            try:
                found = state_of(self.path, self.path.parent, LARGEST)
                state = f"{found.st_size}-{found.st_mtime_ns}"
                if state != self.state:
                    self._read()
                    self.state, self._foreign = state, []
            except OSError as error:
                self._forget()
                self._foreign = [str(error)] if isinstance(error, Foreign) else []
            return self.rows

    def read_all(self) -> list[Record]:
        """Read the new lines, and return all rows. A last line without a line end is reported on stderr.

        Raises:
            UserError: A line is not a row of this file, or the file is not a regular file of the run.
        """
        rows = self.refresh()
        if self._bad:
            raise UserError(f"{self.path}:{self._bad[0]} is not a row of metrics; remove the line")
        if self._foreign:
            raise UserError(f"{self.path} is not read: {self._foreign[0]}")
        if self._file.is_unfinished:
            warn_on_stderr(unfinished(self.path, self._file.lines + 1))
        return rows

    def _read(self) -> None:
        is_first_read, lines = self._file.new_lines()
        if is_first_read:
            self.rows, self._bad = [], []
        rows = list(self.rows)  # a copy, because other threads may be reading the old list
        for number, line in lines:
            if line.strip():
                self._add(rows, number, line)
        self.rows = rows

    def _add(self, rows: list[Record], number: int, line: bytes) -> None:
        try:
            record = json.loads(line)
            usable = isinstance(record, dict) and self.accept(record)
        except (ValueError, TypeError, RecursionError):
            usable = False
        if usable:
            rows.append(record)
        else:
            self._bad.append(number)

    def _forget(self) -> None:
        self.rows, self._bad, self.state = [], [], ""
        self._file.restart()


def has_step(record: Record) -> bool:
    """Whether the record is a row of metrics."""
    step = record.get("step")
    return isinstance(step, int | float) and _is_number(step) and step == int(step)


def is_span(record: Record) -> bool:
    """Whether the record is a span of the timeline."""
    return has_step(record) and all(_is_number(record.get(key)) for key in ("start", "end"))


def is_finding(record: Record) -> bool:
    """Whether the record is a finding of the diagnosis, as far as the page shows it; keys may be missing."""
    texts = all(isinstance(record.get(key, ""), str) for key in ("rule", "severity", "title", "advice", "expect"))
    steps = record.get("steps", [])
    parts = {"proposals": (("why",), ("words", "current")), "witnesses": (("where", "summary", "said"), ())}
    return (
        texts
        and all(_are_texts(record.get(key, [])) for key in ("evidence", "metrics"))
        and isinstance(steps, list)
        and all(map(_is_number, steps))
        and all(_are_parts(record.get(key, []), *keys) for key, keys in parts.items())
    )


def is_row_results(record: Record) -> bool:
    """Whether the record is a line of rows.jsonl (`mtrl/record/row_results.py`)."""
    sources, results = record.get("sources", {}), record.get("results", [])
    return (
        has_step(record)
        and isinstance(sources, dict)
        and all(map(_is_sampler, sources.values()))
        and isinstance(results, list)
        and all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in results)
        and all(_is_share(success) for _, success in results)
    )


def _is_sampler(settings: Any) -> bool:
    """Whether these are the settings of a sampler in rows.jsonl."""
    if not isinstance(settings, dict):
        return False
    band, rows = settings.get("band"), settings.get("rows")
    return (
        isinstance(settings.get("sampler"), str)
        and isinstance(rows, int)
        and _is_number(rows)
        and (band is None or (isinstance(band, list) and len(band) == 2 and all(map(_is_share, band))))
        and _is_share(settings.get("forgetting", 0.0))
    )


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: Any) -> bool:
    """Whether the value is a number that can be drawn; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _are_parts(parts: Any, texts: Iterable[str], lists: Iterable[str]) -> bool:
    return isinstance(parts, list) and all(
        isinstance(part, dict)
        and all(isinstance(part.get(key, ""), str) for key in texts)
        and all(_are_texts(part.get(key, [])) for key in lists)
        for part in parts
    )


def finite(value: float | None) -> float | None:
    """Return the value as a float; None if no curve can show it. Whole numbers in JSON have no limit."""
    return float(value) if value is not None and abs(value) < sys.float_info.max else None


def number_of(value: Any) -> float | None:
    """Return the value of a metric; None if it is not a finite number."""
    return finite(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
