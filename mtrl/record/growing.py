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
            known, data = self._read(file)
            if zlib.crc32(known) != self._tail:
                self.restart()
                known, data = self._read(file)
        is_first_read = self.offset == 0
        end = data.rfind(b"\n") + 1
        found = list(enumerate(data[:end].splitlines(keepends=True), self.lines + 1))
        self.is_unfinished = end < len(data)
        self.offset, self.lines = self.offset + end, self.lines + len(found)
        # The tail is not read again: the file may have been cut meanwhile, and the next call must notice it.
        self._tail = zlib.crc32((known + data[max(0, end - TAIL) : end])[-TAIL:])
        return is_first_read, found

    def _read(self, file: BinaryIO) -> tuple[bytes, bytes]:
        """Return the bytes before the read position that are compared, and all bytes after it."""
        file.seek(max(0, self.offset - TAIL))
        return file.read(min(self.offset, TAIL)), file.read()
