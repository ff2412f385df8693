"""The files of trajectories of a run, and what is known of their lines; made while the page is already shown."""

from __future__ import annotations

import errno
import heapq
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mtrl.tracking.run_dir import RunDir
from mtrl.tracking.trajectories import (
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
from mtrl.view.kept import is_inside

PATIENCE = 2.0
"""Seconds that the first answer waits for stored indexes."""
PAUSE = 0.4
"""Seconds between two looks at a folder; more where a look takes long."""
SHARE = 0.05
"""Of the time may go into looking."""
WORTH_STORING = 0.1
"""Share of lines that must be new before an index is written again: a file that grows line by line is not indexed
anew on disk with each of them."""


class StoredFile:
    """One file; its lines become more while it is indexed."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name.removesuffix(".jsonl")
        self.kind, self.step = kind_and_step(path)
        self.order = (self.step is None, -(self.step or 0), self.kind, self.name)
        """Newest first: by step, those without one last, then kind and name."""
        self.size = self.modified = 0
        """Bytes, and nanoseconds, when it was last seen."""
        self.index: TrajectoryIndex | None = None
        self.indexed = False
        """Whether the index is that of `size` and `modified`."""
        self.done = 0
        """Bytes that are indexed."""
        self.version = 0
        """Changes when the lines do."""
        self.problem: str | None = None
        self.stored = 0
        """Lines of the index in the folder."""

    @property
    def lines(self) -> list[LineSummary]:
        return self.index.lines if self.index is not None else []

    def read_line(self, line: LineSummary) -> bytes:
        """One line of the file.

        Raises:
            OSError: it cannot be read, or is no longer there.
        """
        with self.path.open("rb") as file:
            file.seek(line.offset)
            data = file.read(line.length)
        if len(data) < line.length:
            raise OSError(0, "the file is shorter than it was")
        return data


class Row(NamedTuple):
    """A line in the lists: where it is, and what is known of it."""

    file: StoredFile
    number: int
    """0-based, among the lines that are not empty."""
    line: LineSummary


class Indexer:
    """One thread that indexes files, the quickest first: stored indexes, then small files."""

    def __init__(self) -> None:
        self._queue: list[tuple[bool, int, int, StoredFile]] = []
        self._numbers = count()
        self._wake = threading.Condition()
        self._quick = 0
        """Files with a stored index that were not looked at yet."""
        self._thread: threading.Thread | None = None

    def add(self, file: StoredFile) -> None:
        """Have it indexed."""
        is_slow = file.index is not None or not index_path(file.path).is_file()
        with self._wake:
            self._quick += not is_slow
            heapq.heappush(self._queue, (is_slow, file.size, next(self._numbers), file))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="index", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until the stored indexes are read, but not longer than that."""
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
    """Bring the lines of a file up to date; whatever is wrong with it becomes its `problem`."""
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
    except Exception as error:  # whatever a file holds, the others are to be indexed
        file.problem = f"cannot be indexed ({type(error).__name__}: {error})"
    file.version, file.done, file.indexed = file.version + 1, file.size, True


def _scan(file: StoredFile, before: TrajectoryIndex | None) -> TrajectoryIndex:
    """Read what the index of an older state does not hold, and keep the new one where it can be kept."""
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
        file.index = None  # the stamp is of another file than the lines: nothing may be built on it
        raise OSError(errno.ESTALE, "it was replaced while it was read; it is read again")
    if len(index.lines) - file.stored > WORTH_STORING * file.stored:
        with suppress(OSError):  # a folder that cannot be written: the index stays in memory
            write_index(file.path, index)
            file.stored = len(index.lines)
    return index


class TrajectoryFolder:
    """The files of a run, newest first, and the rows of their lists."""

    def __init__(self, run: Path, indexer: Indexer):
        self.run = run
        self.folder = RunDir(run).trajectories
        self.indexer = indexer
        self._files: dict[str, StoredFile] = {}
        self._rows: tuple[Any, list[Row]] = (None, [])
        self.foreign: list[str] = []
        """What lies among the files and leads out of the run."""
        self._next_look = -math.inf
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Look which files there are and which have changed, and have those indexed; now and then."""
        with self._lock:
            start = time.monotonic()
            if start < self._next_look:
                return
            found = dict(self._list())
            for name in self._files.keys() - found.keys():
                del self._files[name]
            for name, (path, stat) in found.items():
                file = self._files.setdefault(name, StoredFile(path))
                if (file.size, file.modified) != (stat.st_size, stat.st_mtime_ns):
                    file.size, file.modified, file.indexed = stat.st_size, stat.st_mtime_ns, False
                    self.indexer.add(file)
            self._next_look = start + max(PAUSE, (time.monotonic() - start) / SHARE)

    def _list(self) -> Iterator[tuple[str, tuple[Path, os.stat_result]]]:
        """Name to path and state of every file of trajectories that is inside of the run."""
        try:
            self.foreign = [] if is_inside(self.folder, self.run) else [self.folder.name]
            entries = [] if self.foreign else list(os.scandir(self.folder))
        except OSError:
            return
        for entry in entries:
            with suppress(OSError):
                if entry.name.endswith(".jsonl") and entry.is_file():
                    if entry.is_symlink() and not is_inside(Path(entry.path), self.run):
                        self.foreign.append(f"{self.folder.name}/{entry.name}")
                    else:
                        yield entry.name.removesuffix(".jsonl"), (Path(entry.path), entry.stat())

    @property
    def files(self) -> list[StoredFile]:
        return sorted(self._files.values(), key=lambda file: file.order)

    def file(self, name: str) -> StoredFile | None:
        return self._files.get(name)

    @property
    def version(self) -> tuple[tuple[str, int], ...]:
        """Changes when a row does."""
        return tuple((name, file.version) for name, file in list(self._files.items()))

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are indexed, and all."""
        files = list(self._files.values())
        return sum(f.size if f.indexed else min(f.done, f.size) for f in files), sum(f.size for f in files)

    def rows(self) -> list[Row]:
        """All lines that are known, newest file first; the first call waits for the stored indexes."""
        self.refresh()
        self.indexer.wait(PATIENCE)
        version = self.version
        if self._rows[0] != version:
            rows = [Row(file, n, line) for file in self.files for n, line in enumerate(list(file.lines))]
            self._rows = (version, rows)
        return self._rows[1]
