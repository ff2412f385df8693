"""A file of JSON objects, one per line, that somebody may be writing: read once, then only what is new."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

TAIL = 4096
"""Bytes before the place that was read to; if they change, the file was written anew."""
PROBLEMS_KEPT = 5


class Records:
    """The objects of a JSONL file, in order.

    A half-written last line counts when its end is there. Lines that are no object are told in `problems` and left
    out. A run that is resumed cuts its files and goes on, and then all is read anew.
    """

    def __init__(self, path: Path, accept: Callable[[Record], bool] = lambda record: True):
        self.path = path
        self.accept = accept
        """Whether an object is a record of this file."""
        self.rows: list[Record] = []
        self.state = ""
        """Changes when the file does."""
        self._bad: list[int] = []
        self._offset = self._lines = self._tail = 0
        self._lock = threading.Lock()

    @property
    def problems(self) -> list[str]:
        """One sentence if lines were left out."""
        if not self._bad:
            return []
        shown = ", ".join(map(str, self._bad[:PROBLEMS_KEPT])) + (" …" if len(self._bad) > PROBLEMS_KEPT else "")
        return [f"{self.path.name}: {len(self._bad)} lines cannot be read ({shown})"]

    def refresh(self) -> list[Record]:
        """Read what is new, and return all rows; a file that is not there has none."""
        with self._lock:
            try:
                found = self.path.stat()
                state = f"{found.st_size}-{found.st_mtime_ns}"
                if state != self.state:
                    self._read()
                    self.state = state
            except OSError:
                self._forget()
            return self.rows

    def _read(self) -> None:
        with self.path.open("rb") as file:
            file.seek(max(0, self._offset - TAIL))
            if zlib.crc32(file.read(min(self._offset, TAIL))) != self._tail:
                self._forget()
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        rows = list(self.rows)  # others may be reading the old ones
        for line in data[:end].splitlines():
            self._lines += 1
            if line.strip():
                self._add(rows, line)
        self.rows = rows
        self._offset += end
        with self.path.open("rb") as file:
            file.seek(max(0, self._offset - TAIL))
            self._tail = zlib.crc32(file.read(min(self._offset, TAIL)))

    def _add(self, rows: list[Record], line: bytes) -> None:
        try:
            record = json.loads(line)
            usable = isinstance(record, dict) and self.accept(record)
        except (ValueError, TypeError, RecursionError):
            usable = False
        if usable:
            rows.append(record)
        else:
            self._bad.append(self._lines)

    def _forget(self) -> None:
        self.rows, self._bad, self.state = [], [], ""
        self._offset = self._lines = self._tail = 0


def has_step(record: Record) -> bool:
    """Whether it is a row of metrics."""
    step = record.get("step")
    return isinstance(step, int) and not isinstance(step, bool)


def is_span(record: Record) -> bool:
    """Whether it is a span of the timeline."""
    return has_step(record) and all(isinstance(record.get(key), int | float) for key in ("start", "end"))
