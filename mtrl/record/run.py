"""The one reader of a run's folder. The diagnosis, the figures, the trackers, the viewer, the evaluation and notebooks
all read runs through `Run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mtrl.errors import UserError
from mtrl.record.checkpoints import best_checkpoint, complete_checkpoints
from mtrl.record.config import Flat, StoredConfig, read_config, read_whole_config, with_defaults
from mtrl.record.index import Indexer, TrajectoryFolder, list_files
from mtrl.record.metrics import warn_on_stderr
from mtrl.record.reading import Foreign, read, read_json
from mtrl.record.records import LARGEST, Records, finite, has_step, is_finding, is_row_results, is_span, number_of
from mtrl.record.run_dir import RunDir, such_as
from mtrl.record.run_lock import is_held
from mtrl.record.stored import read as read_lines
from mtrl.record.tokens import Tokenizer, find_tokenizer, tokenizer_files
from mtrl.record.trajectories import kind_and_step
from mtrl.scoring.agreement import Thresholds
from mtrl.types import Trajectory

LARGEST_JSON = 2**20
"""Maximum size of summary.json, in bytes."""
LONGEST_STATUS = 100
"""Maximum size of status.txt, in bytes."""
ABANDONED = 3600.0
"""Number of seconds without a write after which a run without a process on this machine is over. A run of another
machine may write nothing for many minutes, for example during its first evaluation."""
SILENCE = 120.0
"""Seconds without a write after which a run counts as stopped; or ten steps, if those take longer."""
REPORT = "report.json"
"""Name of the file that an evaluation (`mtrl.evaluate`) writes last; it has no summary.json."""

T = TypeVar("T")


class Run:
    """The folder of a run, or of an evaluation, which has the same layout.

    Files are read on request, and again when they have changed, so the run may still be running. Links out of the
    folder, pipes and oversized files are never read; only checkpoints may be links to another disk. `config`,
    `settings` and `rows` raise an error if they cannot be read whole. All other properties leave out what cannot be
    read, and `problems` describes it.
    """

    def __init__(self, path: str | Path, run_id: str = "", indexer: Indexer | None = None):
        """
        Args:
            run_id: Unique id among the runs of a viewer; default: the name of the folder.
            indexer: Thread that indexes the trajectories of several runs; default: a thread of this run.
        """
        self.path = Path(path)
        self.id = run_id or self.path.name
        self.dir = RunDir(self.path)
        self.metrics = Records(self.dir.metrics, has_step)
        self.timeline = Records(self.dir.timeline, is_span)
        self.alarms = Records(self.dir.alarms, is_finding)
        self.row_results = Records(self.dir.rows, is_row_results)
        self.index = TrajectoryFolder(self.path, indexer or Indexer())
        self._cached: dict[str, tuple[Hashable, Any]] = {}
        self._tokenizer: tuple[Tokenizer | None, list[str]] | None = None

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Return the run in a folder.

        Raises:
            UserError: The folder does not exist, has no config.yaml, or must not be read.
        """
        run = cls(path)
        try:
            is_file, is_folder, has_config = run.path.is_file(), run.path.is_dir(), run.dir.config.is_file()
        except PermissionError as error:
            raise UserError(f"{run.path} cannot be read ({error.strerror}); let this user read the folder") from error
        if is_file:
            raise UserError(f"{run.path} is a file; give the folder of a run, such as {run.path.parent}")
        if not is_folder:
            raise UserError(f"{run.path} does not exist; give the folder of a run, such as outputs/gsm8k/TIME")
        if not has_config:
            example = such_as(run.path)
            raise UserError(f"{run.path} is no run, for it has no config.yaml; give the folder of a run{example}")
        return run

    def read(self, path: Path, most: int = LARGEST) -> bytes | None:
        """Return the bytes of a file of the run; None if it does not exist or must not be read."""
        try:
            return read(path, self.path, most)
        except OSError:
            return None

    def warn_of_changes(self) -> None:
        """Print a warning on stderr if files of the finished run are not as they were written."""
        if (changed := self.dir.changes()) is not None:
            warn_on_stderr(f"{self.path} has changed since the end of its run: {changed}")

    # -- configuration -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The nested configuration.

        Raises:
            UserError: config.yaml is missing, damaged or incomplete.
        """
        return self._fresh("config", modified(self.dir.config), lambda: read_whole_config(self.path))

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted key. Settings that config.yaml lacks have their defaults.

        Raises:
            UserError: config.yaml is damaged or incomplete.
        """
        changed = modified(self.dir.config)
        return self._fresh("settings", changed, lambda: with_defaults(self.config if changed is not None else {}))

    @property
    def stored_config(self) -> StoredConfig:
        """What can be read of config.yaml, which an older version of mtrl may have written."""
        return self._fresh("stored config", modified(self.dir.config), lambda: read_config(self.path))

    @property
    def flat_config(self) -> Flat:
        """What can be read of config.yaml by dotted key, without defaults, in a form that a page can show."""
        return self.stored_config.flat

    @property
    def name(self) -> str:
        return str(self.flat_config.get("name") or self.path.name)

    @property
    def place(self) -> str:
        """Path relative to the working directory; the last parts of the path if the run is elsewhere."""
        here = Path.cwd()
        inside = here in self.path.parents
        return str(self.path.relative_to(here)) if inside else "/".join(self.path.parts[1:][-3:])

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def max_steps(self) -> int | None:
        steps = self.flat_config.get("trainer.max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def thresholds(self) -> Thresholds:
        """`evaluation.success_threshold` and `evaluation.claim_threshold` of the run."""
        values = [self.flat_config.get(f"evaluation.{name}_threshold") for name in ("success", "claim")]
        success, claim = (finite(v) if isinstance(v, int | float) else None for v in values)
        success = 1.0 if success is None else success
        return Thresholds(success, success if claim is None else claim)

    # -- metrics -----------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, sorted by step, the last row of each step. A row without a line end is left out, and
        reported on stderr.

        Raises:
            UserError: A line is not a row of metrics.
        """
        self.metrics.refresh()
        return self._fresh("rows", self.metrics.state, lambda: _by_step(self.metrics.read_all()))

    @property
    def last_step(self) -> int:
        """Step of the last of `rows`; -1 without rows."""
        return self.rows[-1]["step"] if self.rows else -1

    def series(self, key: str) -> dict[int, float]:
        """Return step -> value for all steps with a finite value."""
        return {row["step"]: value for row in self.rows if (value := number_of(row.get(key))) is not None}

    @property
    def step(self) -> int | None:
        """Last step; None before the first row."""
        return max((row["step"] for row in self.metrics.refresh()), default=None)

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Spans of timeline.jsonl."""
        return self.timeline.refresh()

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the end of the run."""
        return self._read_summary()[0]

    def _read_summary(self) -> tuple[dict[str, Any], list[str]]:
        """Return the contents of summary.json, and its problems as sentences."""
        try:
            return read_json(self.dir.summary, self.path, LARGEST_JSON), []
        except (Foreign, ValueError) as error:
            return {}, [str(error)]
        except OSError:
            return {}, []

    # -- trajectories ------------------------------------------------------------------------------------------------

    def files(self) -> list[Path]:
        """Return the files of trajectories, sorted by step and name. Files without a step are first."""
        found = [Path(entry.path) for entry in list_files(self.path)[0]]
        return sorted(found, key=lambda file: (kind_and_step(file)[1] or 0, file.name))

    def trajectories(self, kind: str = "train") -> Iterator[Trajectory]:
        """Yield the stored trajectories of a kind: train, disagree, eval_greedy or eval_sampled. Lines that cannot be
        read are left out."""
        for file in self.files():
            if file.name.startswith(f"{kind}_"):
                yield from (line.trajectory for line in read_lines(file) if line.trajectory is not None)

    # -- weights and tokenizer ---------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> list[Path]:
        """Folders of the complete checkpoints, sorted by step."""
        return complete_checkpoints(self.dir.checkpoints)

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best score of an evaluation, of equal scores the latest; None without a score."""
        return best_checkpoint(self.checkpoints)

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

    # -- progress ----------------------------------------------------------------------------------------------------

    @property
    def updated(self) -> float | None:
        """Time of the run's last write, in unix seconds."""
        newest = (file.modified / 1e9 for file in self.index.files)
        files = (self.dir.metrics, self.dir.log, self.dir.timeline, self.dir.summary, self.dir.job)
        watched = map(modified, files)
        return max((t for t in (*watched, *newest) if t is not None), default=modified(self.dir.config))

    @property
    def status(self) -> str:
        """running | finished | stopped | empty. This is the content of status.txt, except that a run that is not alive
        was killed and counts as stopped. A folder without status.txt is finished if it has the file that is written
        last."""
        reported = self._status_file()
        if reported in ("finished", "stopped"):
            return reported
        summary, step = self.summary, self.step
        if reported is None and (self.path / REPORT).exists():
            return "finished"
        done = summary.get("steps")
        if reported is None and isinstance(done, int) and done >= max(self.max_steps or 0, step or 0):
            return "finished"
        if self.is_alive:
            return "running"
        return "empty" if step is None and not summary and not self.index.files else "stopped"

    @property
    def final_status(self) -> str | None:
        """`finished` or `stopped` if status.txt has it, else None. A copy of the run has the same status, while the
        modification times of its files may differ."""
        status = self._status_file()
        return status if status in ("finished", "stopped") else None

    @property
    def is_alive(self) -> bool:
        """Whether the run has a process: one of this machine holds its lock, or its files have changed recently. The
        latter is all that can be seen of a process of another machine."""
        rows, updated = self.metrics.refresh(), self.updated
        took = rows[-1].get("time/step") if rows else None
        patience = max(SILENCE, 10 * took if isinstance(took, int | float) else 0)
        return (updated is not None and time.time() - updated < patience) or is_held(self.dir)

    @property
    def was_killed(self) -> bool:
        """Whether the run has no process, and no file of its folder reports its end: status.txt reports a running run,
        or a kill came before status.txt was written."""
        status = self._status_file()
        return not self.is_alive and (status == "running" or (status is None and not self._has_last_file))

    @property
    def is_over(self) -> bool:
        """Whether status.txt reports the end, or the file that is written last is not older than the last row, or a
        run that was killed has written nothing for an hour. The summary of a run and the report of an evaluation are
        those of an earlier end until a resumed one writes them again."""
        if self.final_status is not None:
            return True
        resumed = self._status_file() == "running" and self.is_alive
        if self._has_last_file and not resumed:
            return True
        return self.was_killed and time.time() - (self.updated or 0.0) > ABANDONED

    @property
    def _has_last_file(self) -> bool:
        """Whether the file that a run or an evaluation writes last exists and is not older than the last row."""
        files = (self.path / REPORT, self.dir.summary)
        return any((modified(path) or -1.0) >= (modified(self.dir.metrics) or 0.0) for path in files)

    def problems(self) -> list[str]:
        """Return sentences about the files that cannot be read."""
        broken = [f"trajectories/{f.name}.jsonl {f.problem}" for f in self.index.files if f.problem]
        foreign = [f"{name} leads out of the run and is not read" for name in self.index.foreign]
        growing = (self.metrics, self.timeline, self.alarms, self.row_results)
        records = [problem for file in growing for problem in file.problems]
        tokenizer = self._tokenizer[1] if self._tokenizer is not None else []
        return [*self.stored_config.problems, *self._read_summary()[1], *records, *tokenizer, *broken, *foreign]

    def _status_file(self) -> str | None:
        text = self.read(self.dir.status, LONGEST_STATUS)
        return None if text is None else text.decode(errors="replace").strip()

    def _fresh(self, name: str, state: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result of `make`, which is called again when the state of its file has changed."""
        if name not in self._cached or self._cached[name][0] != state:
            self._cached[name] = (state, make())
        found: T = self._cached[name][1]
        return found


def run_of(path: Path) -> Path | None:
    """Return the folder of the run at a path, or of the run that contains it at most two levels above; None if there is
    none."""
    return next((folder for folder in (path, path.parent, path.parent.parent) if RunDir(folder).config.is_file()), None)


def modified(path: Path) -> float | None:
    """Return the time of the last change of a file, in unix seconds; None if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]
