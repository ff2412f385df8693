"""metrics.jsonl: one row per step, written so that a kill at any instant loses no finished row."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.utils.files import replace_file, to_strict_json


def unfinished(path: Path | str, line: int) -> str:
    """Return the sentence that reports a last line (1-based number) without a line end."""
    return f"{path}:{line} has no end, so this row is left out: its run was killed or is still writing the row"


def unfinished_row(path: Path) -> str | None:
    """Return the sentence about an unfinished last line of a metrics.jsonl; None if the last line has its end, or if
    the file does not exist."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return None
    return unfinished(path, len(lines)) if lines and not lines[-1].endswith(b"\n") else None


def warn_on_stderr(sentence: str) -> None:
    """Print a warning on stderr, for programs without a console of their own."""
    print(f"warning: {sentence}", file=sys.stderr)


class MetricsLog:
    """Appends rows `{"step": n, …}` to a file and reads them back.

    Each row is one line and one write, so rows are never interleaved, and rows written before a kill survive it. Only
    the last line can be half-written. Such a line is reported through `warn`, counts as absent and is cut off before
    the next row. NaN and infinities are written as null, because JSON has neither.
    """

    name = "metrics.jsonl"

    def __init__(self, path: str | Path, warn: Callable[[str], object] = warn_on_stderr):
        """`warn` is called with one sentence when a row is left out."""
        self.path, self.warn = Path(path), warn
        self._file: int | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of `step`."""
        if self._file is None:
            self._cut(self._end())
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        row = (to_strict_json({"step": step, **metrics}) + "\n").encode("utf-8", "backslashreplace")
        size = os.fstat(self._file).st_size
        if os.write(self._file, row) < len(row):  # the disk filled up in mid-row
            os.ftruncate(self._file, size)
            raise OSError(errno.ENOSPC, "no space left for a row", str(self.path))

    def truncate(self, step: int) -> None:
        """Remove all rows with a later step than `step`, at any position, and a half-written last line. A resumed run
        writes those steps again."""
        self.close()
        data = self._bytes()
        earlier = b"".join(
            data[start : data.index(b"\n", start) + 1] for start, row in self._rows() if row["step"] <= step
        )
        if data.startswith(earlier):
            self._cut(len(earlier))
        else:
            replace_file(self.path, lambda part: part.write_bytes(earlier))

    def read(self) -> list[dict[str, Any]]:
        """Return all finished rows. The run may still be writing."""
        return [row for _, row in self._rows()]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each finished row with the offset of its start, in bytes."""
        start = 0
        lines = self._bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                yield start, self._parse(line, number)
            else:
                self.warn(unfinished(self.path, number))
            start += len(line)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{self.path}:{number} is not a row of metrics; remove the line") from error
        return row

    def _bytes(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _end(self) -> int:
        """Return the offset of the end of the last whole line, in bytes."""
        return self._bytes().rfind(b"\n") + 1

    def _cut(self, size: int) -> None:
        if self.path.exists() and self.path.stat().st_size > size:
            os.truncate(self.path, size)
