"""A file of lines that a process may be appending to: later reads return only the new lines."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import BinaryIO

TAIL = 4096
"""Number of bytes before the read position that are compared; if they changed, the file was replaced or cut."""


class GrowingFile:
    """Reads the whole lines of a file, each once.

    A last line without a line end is left for a later read, because a process may be writing it. A resumed run cuts its
    files; then all lines are read again.
    """

    def __init__(self, path: Path):
        self.path = path
        self.is_unfinished = False
        """Whether the last line had no line end at the last read."""
        self.restart()

    def restart(self) -> None:
        """Read from the first line next time."""
        self.offset = self.lines = self._tail = 0
        """Number of bytes and of lines that were read."""
        self.is_unfinished = False

    def new_lines(self) -> tuple[bool, list[tuple[int, bytes]]]:
        """Return whether the file was read from its first line, and the new lines with their numbers (from 1).

        Raises:
            OSError: The file cannot be read.
        """
        with self.path.open("rb") as file:
            if self._checksum(file) != self._tail:
                self.restart()
            is_first_read = self.offset == 0
            file.seek(self.offset)
            data = file.read()
            end = data.rfind(b"\n") + 1
            found = list(enumerate(data[:end].splitlines(keepends=True), self.lines + 1))
            self.is_unfinished = end < len(data)
            self.offset, self.lines = self.offset + end, self.lines + len(found)
            self._tail = self._checksum(file)
        return is_first_read, found

    def _checksum(self, file: BinaryIO) -> int:
        file.seek(max(0, self.offset - TAIL))
        return zlib.crc32(file.read(min(self.offset, TAIL)))
