"""Reader of a metrics.jsonl that grows, and that is cut when its run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtrl.record.growing import GrowingFile
from mtrl.record.records import finite
from mtrl.trackers.items import Item, MetricsRow, UnreadableItem, digest, row_digest

SECONDS = ("time/step", "time/evaluate")
"""Metrics with the seconds of a step, and of the evaluation after it."""

MOST_SECONDS = 1e10
"""Upper bound of the seconds of a run, since a row may hold any number and trackers take times as whole numbers."""


class RowReader:
    """Reads the new rows. If the file was replaced or cut, it reads all rows again."""

    def __init__(self, path: Path, started: int):
        self._file = GrowingFile(path)
        self.started = started
        """Start of the run, in milliseconds since 1970."""
        self.times: dict[int, int] = {}
        """End of each step by step number, in milliseconds since 1970, computed from the durations in the rows."""
        self.restart()

    def restart(self) -> None:
        """Read from the beginning next time."""
        self._file.restart()
        self._seconds = 0.0
        self.times.clear()

    @property
    def last_step(self) -> int:
        """Largest step of the rows read so far; -1 before the first row."""
        return max(self.times, default=-1)

    def new(self) -> tuple[bool, list[Item]]:
        """Return whether the file was read from its beginning, and the rows that were read. A last line without a line
        end is left for later; `mtrl.record.metrics.unfinished_row` reports it when the file is complete."""
        try:
            is_first_read, lines = self._file.new_lines()
        except FileNotFoundError:
            self.restart()
            return True, []
        if is_first_read:
            self._seconds = 0.0
            self.times.clear()
        return is_first_read, [self._item(number, line) for number, line in lines]

    def _item(self, number: int, line: bytes) -> Item:
        try:
            row = json.loads(line)
            step = int(row.pop("step"))
            numbers = {name: float(value) for name, value in row.items() if _is_number(value)}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return UnreadableItem(
                f"{self._file.path.name}, line {number}", digest(line), f"{error} is wrong in this row"
            )
        self._seconds = min(self._seconds + sum(numbers.get(name, 0.0) for name in SECONDS), MOST_SECONDS)
        again = f", line {number}" if step in self.times else ""
        self.times[step] = self.started + round(1000 * self._seconds)
        return MetricsRow(f"{self._file.path.name}:{step}{again}", row_digest(row), step, numbers, self.times[step])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and finite(value) is not None
