"""Search for runs below folders, and the runs that a viewer shows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from mtrl.errors import UserError
from mtrl.record.index import Indexer
from mtrl.record.run import Run, modified
from mtrl.record.run_dir import RunDir

DEPTH = 3
"""Maximum depth of runs below the given folder: outputs/NAME/TIME, and the jobs of a sweep below that."""
MOST_RUNS = 200
MOST_FOLDERS = 20_000


class Library:
    """The runs below the paths of the command line. Requests also find new runs."""

    LOOK_EVERY = 3.0
    """Minimum seconds between two searches for new runs."""

    def __init__(self, paths: Sequence[Path]):
        """Find the runs.

        Raises:
            UserError: A path is not a run and holds none.
        """
        self.paths = paths
        self.indexer = Indexer()
        self.warnings: list[str] = []
        self.left_out = 0
        """Number of runs that were found and are not shown."""
        self._runs: dict[Path, Run] = {}
        self._looked = -math.inf
        self._lock = threading.Lock()
        for path in paths:
            if not path.is_dir():
                what = "is no folder" if path.exists() else "does not exist"
                raise UserError(f"{path} {what}; give the folder of a run, or one that holds runs")
            if next(find_runs(path), None) is None:
                raise UserError(
                    f"{path} holds no run (config.yaml and metrics.jsonl or trajectories/); give another folder"
                )
        self.refresh()

    def refresh(self) -> None:
        """Search for new runs, at most every `LOOK_EVERY` seconds."""
        with self._lock:
            if time.monotonic() - self._looked >= self.LOOK_EVERY:
                self._looked = time.monotonic()
                self._find()

    def _find(self) -> None:
        found = list(dict.fromkeys(run for path in self.paths for run in find_runs(path.resolve())))
        self.warnings, self.left_out = [], max(0, len(found) - MOST_RUNS)
        if len(found) > MOST_RUNS:
            self.warnings = [f"{len(found)} runs were found, and the newest {MOST_RUNS} are shown; name fewer"]
            found = sorted(found, key=lambda run: modified(run) or 0, reverse=True)[:MOST_RUNS]
        ids = names_of(found)
        self._runs = {path: self._runs.get(path) or Run(path, ids[path], self.indexer) for path in found}

    @property
    def runs(self) -> list[Run]:
        """The runs in the order of the command line; runs of one folder are sorted by name."""
        self.refresh()
        return list(self._runs.values())

    def run(self, run_id: str) -> Run | None:
        return next((run for run in self.runs if run.id == run_id), None)


def is_run(path: Path) -> bool:
    """Whether a folder holds files of a run. A folder that this user must not read holds none."""
    run = RunDir(path)
    try:
        if run.metrics.is_file() or next(run.trajectories.glob("*.jsonl"), None) is not None:
            return True
        return run.config.is_file() and (run.trajectories.is_dir() or run.summary.is_file())
    except PermissionError:
        return False


def find_runs(path: Path, levels: int = DEPTH) -> Iterator[Path]:
    """Yield the folder itself if it is a run, else the runs up to `levels` levels below it, sorted by name."""
    todo, seen = [(path, 0)], 0
    while todo:
        folder, depth = todo.pop()
        seen += 1
        if is_run(folder):
            yield folder
        elif depth < levels and seen < MOST_FOLDERS:
            with suppress(OSError):
                below = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
                todo += [(entry, depth + 1) for entry in sorted(below, reverse=True) if not entry.is_symlink()]


def names_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Return an id for each path: as many of its last parts as distinguish it from the others, and a number if that is
    not enough."""
    ids: dict[Path, str] = {}
    for path in paths:
        parts = path.parts[1:] or ("run",)
        longer = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        ends = {n: [p.parts[-n:] for p in paths] for n in range(1, len(parts) + 1)}
        unique = (name for n, name in enumerate(longer, 1) if ends[n].count(path.parts[-n:]) == 1)
        name = next(unique, ".".join(parts))
        ids[path] = next(each for n in count(1) if (each := name if n == 1 else f"{name}~{n}") not in ids.values())
    return ids
