"""The files of trajectories of a run, and the summaries of their lines, which a thread computes while the page is
already shown."""

from __future__ import annotations

import errno
import heapq
import math
import os
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mtrl.record.reading import is_inside
from mtrl.record.run_dir import RunDir
from mtrl.record.trajectories import (
    LineSummary,
    TrajectoryIndex,
    continues,
    index_path,
    is_fresh,
    kind_and_step,
    read_index,
    scan,
    stamp_of,
    write_index,
)

PATIENCE = 2.0
"""Maximum seconds that the first answer waits for stored indexes."""
PAUSE = 0.4
"""Minimum seconds between two scans of a folder; longer if a scan takes long."""
SHARE = 0.05
"""Maximum share of the time that is spent on scanning."""
WORTH_STORING = 0.1
"""Share of lines that must be new before an index is written again, so that a file that grows line by line does not
cause a write for every line."""


class StoredFile:
    """One file of trajectories; lines are added while it is indexed."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name.removesuffix(".jsonl")
        self.kind, self.step = kind_and_step(path)
        self.order = (self.step is None, -(self.step or 0), self.kind, self.name)
        """Sort key, newest first: by step, files without a step last, then by kind and name."""
        self.size = self.modified = 0
        """Size in bytes and modification time in nanoseconds, at the last scan."""
        self.index: TrajectoryIndex | None = None
        self.indexed = False
        """Whether the index belongs to the state `size` and `modified`."""
        self.done = 0
        """Number of indexed bytes."""
        self.version = 0
        """Number that changes when the lines change."""
        self.problem: str | None = None
        self.stored = 0
        """Number of lines of the index on disk."""

    @property
    def lines(self) -> list[LineSummary]:
        return self.index.lines if self.index is not None else []

    def read_line(self, line: LineSummary) -> bytes:
        """Return the bytes of one line of the file.

        Raises:
            OSError: The file cannot be read, or no longer has the line.
        """
        with self.path.open("rb") as file:
            file.seek(line.offset)
            data = file.read(line.length)
        if len(data) < line.length:
            raise OSError(0, "the file is shorter than it was")
        return data


class IndexRow(NamedTuple):
    """A line of a file in the lists, with its location and its summary."""

    file: StoredFile
    number: int
    """Index of the line among the lines that are not empty, from 0."""
    line: LineSummary


class Indexer:
    """Thread that indexes files, the fastest first: files with stored indexes, then small files."""

    def __init__(self) -> None:
        self._queue: list[tuple[bool, int, int, StoredFile]] = []
        self._numbers = count()
        self._wake = threading.Condition()
        self._quick = 0
        """Number of queued files with a stored index that has not been read yet."""
        self._thread: threading.Thread | None = None

    def add(self, file: StoredFile) -> None:
        """Add a file to the queue."""
        is_slow = file.index is not None or not index_path(file.path).is_file()
        with self._wake:
            self._quick += not is_slow
            heapq.heappush(self._queue, (is_slow, file.size, next(self._numbers), file))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="index", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until the stored indexes are read, at most `seconds`."""
        with self._wake:
            self._wake.wait_for(lambda: not self._quick, seconds)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue)
                is_slow, _, _, file = heapq.heappop(self._queue)
            try:
                index_file(file)
            finally:
                with self._wake:
                    self._quick -= not is_slow
                    self._wake.notify_all()


def index_file(file: StoredFile) -> None:
    """Update the lines of a file. An error becomes the `problem` of the file."""
    try:
        found = file.path.stat()
        file.size, file.modified = found.st_size, found.st_mtime_ns
        stored = read_index(file.path) if file.index is None else None
        file.stored = len(stored.lines) if stored is not None else file.stored
        index = file.index or stored
        if index is None or not is_fresh(index, file.path):
            index = _scan(file, index)
        file.index, file.problem = index, None
    except OSError as error:
        file.problem = f"cannot be read ({error.strerror})"
    except Exception as error:  # no file may prevent the indexing of the others
        file.problem = f"cannot be indexed ({type(error).__name__}: {error})"
    file.version, file.done, file.indexed = file.version + 1, file.size, True


def _scan(file: StoredFile, before: TrajectoryIndex | None) -> TrajectoryIndex:
    """Index the lines that the index of an older state lacks, and store the new index if the folder can be written."""
    inode = file.path.stat().st_ino
    known = before.lines if before is not None and continues(before, file.path) else []
    end = known[-1].offset + known[-1].length if known else 0
    index = file.index = TrajectoryIndex(stamp_of(file.path, end), list(known))
    for summary in scan(file.path, end):
        end = file.done = summary.offset + summary.length
        index.lines.append(summary)
        file.version += 1
    index.stamp = stamp_of(file.path, end)
    if file.path.stat().st_ino != inode:
        file.index = None  # stamp and lines belong to different files, so the index is invalid
        raise OSError(errno.ESTALE, "it was replaced while it was read; it is read again")
    if len(index.lines) - file.stored > WORTH_STORING * file.stored:
        with suppress(OSError):  # if the folder cannot be written, the index stays in memory only
            write_index(file.path, index)
            file.stored = len(index.lines)
    return index


def list_files(run: Path) -> tuple[list[os.DirEntry[str]], list[str]]:
    """Return the files of trajectories of a run, and the names of the entries that lead out of the run, which must not
    be read."""
    folder = RunDir(run).trajectories
    found, foreign = [], []
    try:
        if not is_inside(folder, run):
            return [], [folder.name]
        entries = list(os.scandir(folder))
    except OSError:
        return [], []
    for entry in entries:
        with suppress(OSError):
            if entry.name.endswith(".jsonl") and entry.is_file():
                if entry.is_symlink() and not is_inside(Path(entry.path), run):
                    foreign.append(f"{folder.name}/{entry.name}")
                else:
                    found.append(entry)
    return found, foreign


class TrajectoryFolder:
    """The files of a run, newest first, and the rows of their lists."""

    def __init__(self, run: Path, indexer: Indexer):
        self.run = run
        self.indexer = indexer
        self._files: dict[str, StoredFile] = {}
        self._rows: tuple[Any, list[IndexRow]] = (None, [])
        self.foreign: list[str] = []
        """Names of entries in the folder that lead out of the run."""
        self._next_look = -math.inf
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Scan the folder for new and changed files, and queue them for indexing. Calls shortly after a scan do
        nothing."""
        with self._lock:
            start = time.monotonic()
            if start < self._next_look:
                return
            entries, self.foreign = list_files(self.run)
            found = {entry.name.removesuffix(".jsonl"): entry for entry in entries}
            for name in self._files.keys() - found.keys():
                del self._files[name]
            for name, entry in found.items():
                try:
                    stat = entry.stat()
                except OSError:  # removed meanwhile
                    continue
                file = self._files.setdefault(name, StoredFile(Path(entry.path)))
                if (file.size, file.modified) != (stat.st_size, stat.st_mtime_ns):
                    file.size, file.modified, file.indexed = stat.st_size, stat.st_mtime_ns, False
                    self.indexer.add(file)
            self._next_look = start + max(PAUSE, (time.monotonic() - start) / SHARE)

    @property
    def files(self) -> list[StoredFile]:
        return sorted(self._files.values(), key=lambda file: file.order)

    def file(self, name: str) -> StoredFile | None:
        return self._files.get(name)

    @property
    def version(self) -> tuple[tuple[str, int], ...]:
        """Value that changes when a row changes."""
        return tuple((name, file.version) for name, file in list(self._files.items()))

    @property
    def progress(self) -> tuple[int, int]:
        """Number of indexed bytes, and of all bytes."""
        files = list(self._files.values())
        return sum(f.size if f.indexed else min(f.done, f.size) for f in files), sum(f.size for f in files)

    def rows(self) -> list[IndexRow]:
        """Return all indexed lines, the newest file first. The call waits for stored indexes, at most `PATIENCE`
        seconds."""
        self.refresh()
        self.indexer.wait(PATIENCE)
        version = self.version
        if self._rows[0] != version:
            rows = [IndexRow(file, n, line) for file in self.files for n, line in enumerate(list(file.lines))]
            self._rows = (version, rows)
        return self._rows[1]
