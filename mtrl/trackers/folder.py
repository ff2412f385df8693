"""The folder of a run as a sequence of pieces, and which of them a destination does not have yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import yaml

from mtrl.config.keys import flat
from mtrl.record.config import tree_of
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.record.trajectories import kind_and_step, whole_lines
from mtrl.scoring.agreement import Thresholds
from mtrl.trackers.items import (
    Artifact,
    Ended,
    Item,
    MetricsRow,
    RunSettings,
    SentTrajectory,
    UnreadableItem,
    Whole,
    digest,
    trajectory_digest,
)
from mtrl.trackers.receipts import Receipts
from mtrl.trackers.rows import RowReader
from mtrl.types import trajectory_from_dict

FILES = (
    *("config.yaml", "summary.json", "curves.png", "preflight.json", "alarms.jsonl", "timeline.jsonl", "rows.jsonl"),
    *("report.json", "report.md", "report.html"),
)
"""Names of the files that are sent unchanged at the end; the last three belong to an evaluation."""

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """Limits and thresholds for reading the folder of a run."""

    trajectories: int
    """Maximum number of trajectories sent from each file."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    rows_at_once: int = 10
    episodes_at_once: int | None = 8
    """Number of trajectories per batch; None: all trajectories of a file."""


class Folder:
    """Finds the new pieces in the folder of a run, or of an evaluation, which has the same layout."""

    def __init__(self, run: RunDir, receipts: Receipts, started: int, reading: Reading):
        self.run, self.receipts, self.started, self.reading = Run(run.path), receipts, started, reading
        self._rows = RowReader(run.metrics, started)
        self._waiting: list[Item] = []

    def restart(self) -> None:
        """Read everything again, because the receipts have changed."""
        self._rows.restart()
        self._waiting.clear()

    def pending(self, final: bool = False, is_over: bool = False) -> Iterator[list[Item]]:
        """Yield the pieces to send, in order, in batches of one kind. Call again when the receipts have changed.

        While a run goes on, a file of trajectories counts as whole once the row of its step exists.

        Args:
            final: Include all files, and trajectories of a step that never got its row.
            is_over: No process writes here any more, so the run has finished or stopped.
        """
        yield from self._one(self._settings())
        yield from _batches(self._new_rows(), self.reading.rows_at_once)
        for path in self.run.files():
            if final or (kind_and_step(path)[1] or 0) <= self._rows.last_step:
                yield from self._file(path)
        if final:
            for name in FILES:
                yield from self._one(self._artifact(self.run.path / name))
            if is_over or self.run.is_over:
                yield from self._one(self._ended())

    def first_step(self) -> int:
        """Return the lowest step whose row is to be sent; one past the last row if there is none."""
        return min(
            (row.step for row in self._new_rows() if isinstance(row, MetricsRow)), default=self._rows.last_step + 1
        )

    def _one(self, item: Item | None) -> Iterator[list[Item]]:
        if item is not None and not self.receipts.has(item):
            yield [item]

    def _settings(self) -> Item | None:
        path = self.run.dir.config
        content = self.run.read(path)
        if content is None:
            return None
        try:
            return RunSettings(path.name, digest(content), flat(tree_of(content)))
        except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
            return UnreadableItem(path.name, digest(content), "it is no YAML mapping")

    def _new_rows(self) -> list[Item]:
        fresh, rows = self._rows.new()
        known = [] if fresh else self._waiting
        self._waiting = [row for row in [*known, *rows] if not self.receipts.has(row)]
        return self._waiting

    def _file(self, path: Path) -> Iterator[list[Item]]:
        """Yield the trajectories of a file that are not sent yet, and then the mark of the whole file."""
        key, state = f"trajectories/{path.name}", path.stat()
        whole = Whole(key, f"{state.st_size}:{state.st_mtime_ns}:{self.reading.trajectories}")
        if self.receipts.has(whole):
            return
        with path.open("rb") as file:
            lines = enumerate(islice(whole_lines(file), self.reading.trajectories), 1)
            episodes = (self._episode(path, number, line) for number, line in lines)
            yield from _batches((e for e in episodes if not self.receipts.has(e)), self.reading.episodes_at_once)
        yield [whole]

    def _episode(self, path: Path, number: int, line: bytes) -> Item:
        key = f"trajectories/{path.name}:{number}"
        kind, step = kind_and_step(path)
        at = self._rows.times.get(step or 0, self._rows.started)
        try:
            data = json.loads(line)
            trajectory = trajectory_from_dict(data)
            verdict = self.reading.thresholds.verdict(trajectory)
            return SentTrajectory(
                key, trajectory_digest(data), path.stem, number, kind, step or 0, str(verdict), at, trajectory
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            return UnreadableItem(key, digest(line), f"it is no trajectory ({type(error).__name__}: {error})")

    def _artifact(self, path: Path) -> Item | None:
        content = self.run.read(path)
        return None if content is None else Artifact(f"file {path.name}", digest(content), path)

    def _is_short(self) -> bool:
        """Whether the run was stopped before `trainer.max_steps`, although it may have written its summary."""
        steps = self.run.max_steps
        return steps is not None and not self.run.dir.is_evaluation and self._rows.last_step < steps

    def _ended(self) -> Item:
        status = self.run.final_status
        if status is None:
            finished = self.run.is_over and not (self.run.was_killed or self._is_short())
        else:
            finished = status == "finished"
        return Ended("end", f"{'finished' if finished else 'stopped'} at step {self._rows.last_step}", finished)


def _batches(items: Iterable[T], size: int | None) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def count(batches: Iterable[list[Item]]) -> dict[str, int]:
    """Return the number of pieces of each kind: `{"rows": 3, "trajectories": 64, "files": 2}`."""
    found = {"rows": 0, "trajectories": 0, "files": 0}
    for item in (item for batch in batches for item in batch):
        if isinstance(item, MetricsRow):
            found["rows"] += 1
        elif isinstance(item, SentTrajectory):
            found["trajectories"] += 1
        elif isinstance(item, RunSettings | Artifact):
            found["files"] += 1
    return {name: number for name, number in found.items() if number}
