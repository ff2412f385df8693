"""Reader of a metrics.jsonl that grows, and that is cut when its run is resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrl.trackers.items import Item, Row, Unreadable, digest, row_digest

SECONDS = ("time/step", "time/evaluate")
"""Metrics with the seconds of a step, and of the evaluation after it."""


class Rows:
    """Reads the new rows. If the file was replaced or cut, it reads all rows again."""

    def __init__(self, path: Path, started: int):
        self.path = path
        self.started = started
        """Start of the run, in milliseconds since 1970."""
        self.times: dict[int, int] = {}
        """End of each step by step number, in milliseconds since 1970, computed from the durations in the rows."""
        self.restart()

    def restart(self) -> None:
        """Read from the beginning next time."""
        self._offset, self._last, self._seconds, self._line = 0, b"", 0.0, 0
        self.times.clear()

    @property
    def last_step(self) -> int:
        """Largest step of the rows read so far; -1 before the first row."""
        return max(self.times, default=-1)

    def new(self) -> tuple[bool, list[Item]]:
        """Return whether the file was read from its beginning, and the rows that were read. A last line without a line
        end is left for later; `mtrl.record.metrics.unfinished_row` reports it when the file is complete."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._offset - len(self._last)))
                if file.read(len(self._last)) != self._last:
                    self.restart()
                fresh = self._offset == 0
                file.seek(self._offset)
                return fresh, list(self._items(file))
        except FileNotFoundError:
            self.restart()
            return True, []

    def _items(self, lines: Iterator[bytes] | Any) -> Iterator[Item]:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            self._last = line
            self._line += 1
            yield self._item(line)

    def _item(self, line: bytes) -> Item:
        try:
            row = json.loads(line)
            step = int(row.pop("step"))
            numbers = {name: float(value) for name, value in row.items() if _is_number(value)}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return Unreadable(f"{self.path.name}, line {self._line}", digest(line), f"{error} is wrong with it")
        self._seconds += sum(numbers.get(name, 0.0) for name in SECONDS)
        again = f", line {self._line}" if step in self.times else ""
        self.times[step] = self.started + round(1000 * self._seconds)
        return Row(f"{self.path.name}:{step}{again}", row_digest(row), step, numbers, self.times[step])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
