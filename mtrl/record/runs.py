"""The runs that the viewer shows: their folders, configurations and progress."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from mtrl.errors import UserError
from mtrl.record.config import Flat, read_config
from mtrl.record.index import Indexer, TrajectoryFolder
from mtrl.record.reading import Foreign, read
from mtrl.record.records import Records, finite, has_step, is_finding, is_span
from mtrl.record.run_dir import RunDir
from mtrl.record.tokens import Tokenizer, find_tokenizer, tokenizer_files
from mtrl.scoring.agreement import Thresholds

DEPTH = 3
"""Maximum depth of runs below the given folder: outputs/NAME/TIME, and the jobs of a sweep below that."""
MOST_RUNS = 200
MOST_FOLDERS = 20_000
LARGEST_SUMMARY = 2**20
"""Maximum size of summary.json, in bytes."""
LONGEST_STATUS = 100
"""Maximum size of status.txt, in bytes."""
SILENCE = 120.0
"""Seconds without a write after which a run counts as stopped; or ten steps, if those take longer."""
REPORT = "report.json"
"""Name of the file that an evaluation (`mtrl.evaluate`) writes last; it has no summary.json."""
PLACES = ("run_dir", "resume")
"""Keys that never count as a difference between runs."""


class Run:
    """The folder of one run. Files are read on request, and again when they have changed."""

    def __init__(self, path: Path, run_id: str, indexer: Indexer):
        self.path, self.id = path, run_id
        self.dir = RunDir(path)
        self.metrics = Records(self.dir.metrics, has_step)
        self.timeline = Records(self.dir.timeline, is_span)
        self.alarms = Records(self.dir.alarms, is_finding)
        self.trajectories = TrajectoryFolder(path, indexer)
        self._config: tuple[float, Flat, list[str]] = (-1.0, {}, [])
        self._tokenizer: tuple[Tokenizer | None, list[str]] | None = None

    @property
    def config(self) -> Flat:
        """config.yaml with dotted keys; empty if it is missing or unreadable."""
        changed = modified(self.dir.config) or 0.0
        if changed != self._config[0]:
            self._config = (changed, *read_config(self.path))
        return self._config[1]

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.name)

    @property
    def place(self) -> str:
        """Path relative to the working directory of the viewer; the last parts of the path if the run is elsewhere."""
        here = Path.cwd()
        inside = here in self.path.parents
        return str(self.path.relative_to(here)) if inside else "/".join(self.path.parts[1:][-3:])

    @property
    def thresholds(self) -> Thresholds:
        """`evaluation.success_threshold` and `evaluation.claim_threshold` of the run."""
        values = [self.config.get(f"evaluation.{name}_threshold") for name in ("success", "claim")]
        success, claim = (finite(v) if isinstance(v, int | float) else None for v in values)
        success = 1.0 if success is None else success
        return Thresholds(success, success if claim is None else claim)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the run. While there is none, it is searched again, because a run writes it at its start or its
        end."""
        if self._tokenizer is None or self._tokenizer[0] is None:
            self._tokenizer = find_tokenizer(self.path)
        return self._tokenizer[0]

    @property
    def has_tokenizer(self) -> bool:
        """Whether a file of the tokenizer exists. It is read only when a trajectory is shown."""
        if self._tokenizer is not None and self._tokenizer[0] is None and self._tokenizer[1]:
            return False
        return any(path.is_file() for path in tokenizer_files(self.path))

    def read_summary(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Return summary.json, and its problems as sentences."""
        try:
            summary = json.loads(read(self.dir.summary, self.path, LARGEST_SUMMARY))
        except Foreign as error:
            return None, [str(error)]
        except OSError:
            return None, []
        except (ValueError, RecursionError):
            return None, ["summary.json is not JSON"]
        return (summary, []) if isinstance(summary, dict) else (None, ["summary.json holds no summary"])

    def problems(self) -> list[str]:
        """Return sentences about the files that cannot be read."""
        broken = [f"trajectories/{f.name}.jsonl {f.problem}" for f in self.trajectories.files if f.problem]
        foreign = [f"{name} leads out of the run and is not read" for name in self.trajectories.foreign]
        records = [problem for file in (self.metrics, self.timeline, self.alarms) for problem in file.problems]
        tokenizer = self._tokenizer[1] if self._tokenizer is not None else []
        return [*self._config[2], *self.read_summary()[1], *records, *tokenizer, *broken, *foreign]

    @property
    def step(self) -> int | None:
        return max((row["step"] for row in self.metrics.refresh()), default=None)

    @property
    def max_steps(self) -> int | None:
        steps = self.config.get("trainer.max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def updated(self) -> float | None:
        """Time of the run's last write, in unix seconds."""
        newest = (file.modified / 1e9 for file in self.trajectories.files)
        watched = map(modified, (self.dir.metrics, self.dir.log, self.dir.timeline, self.dir.summary))
        return max((t for t in (*watched, *newest) if t is not None), default=modified(self.dir.config))

    @property
    def status(self) -> str:
        """running | finished | stopped | empty. This is the content of status.txt, except that a run without recent
        writes was killed and counts as stopped. A folder without status.txt, such as that of an evaluation, is finished
        if it has the file that is written last."""
        summary, step, updated = self.read_summary()[0], self.step, self.updated
        said = self._said_of_itself()
        if said in ("finished", "stopped"):
            return said
        if said is None and (self.path / REPORT).exists():
            return "finished"
        done = summary.get("steps") if summary is not None else None
        if said is None and isinstance(done, int) and done >= max(self.max_steps or 0, step or 0):
            return "finished"
        if self._spoke_lately(updated):
            return "running"
        return "empty" if step is None and summary is None and not self.trajectories.files else "stopped"

    def _said_of_itself(self) -> str | None:
        try:
            return read(self.dir.status, self.path, LONGEST_STATUS).decode(errors="replace").strip()
        except (OSError, Foreign):
            return None

    def _spoke_lately(self, updated: float | None) -> bool:
        rows = self.metrics.rows
        took = rows[-1].get("time/step") if rows else None
        patience = max(SILENCE, 10 * took if isinstance(took, int | float) else 0)
        return updated is not None and time.time() - updated < patience


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
        found = list(dict.fromkeys(run for path in self.paths for run in find_runs(path)))
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
    """Whether a folder holds files of a run."""
    run = RunDir(path)
    if run.metrics.is_file() or next(run.trajectories.glob("*.jsonl"), None) is not None:
        return True
    return run.config.is_file() and (run.trajectories.is_dir() or run.summary.is_file())


def find_runs(path: Path) -> Iterator[Path]:
    """Yield the folder itself if it is a run, else the runs below it, sorted by name."""
    todo, seen = [(path.resolve(), 0)], 0
    while todo:
        folder, depth = todo.pop()
        seen += 1
        if is_run(folder):
            yield folder
        elif depth < DEPTH and seen < MOST_FOLDERS:
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


def modified(path: Path) -> float | None:
    """Return the time of the last change of a file, in unix seconds; None if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
