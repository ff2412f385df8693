"""Reading of runs from their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mtrl.config.keys import flat
from mtrl.config.plain_yaml import read_config
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.record.metrics import MetricsLog
from mtrl.record.run_dir import RunDir
from mtrl.record.stored import read
from mtrl.types import Trajectory

LEVELS = 2
"""Maximum depth below a given folder at which runs are searched: sweep/run, study/arm/seed."""


@dataclass(frozen=True)
class Run:
    """The settings and the metrics of a run so far."""

    path: Path
    settings: dict[str, Any]
    """All settings by dotted key; settings that an older config.yaml lacks have their defaults."""
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl, sorted by step, one per step."""

    @property
    def seed(self) -> Any:
        return self.settings.get("seed")

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"]

    @property
    def folder(self) -> RunDir:
        return RunDir(self.path)

    def series(self, key: str) -> dict[int, float]:
        """Return step -> value for all steps with a finite value."""
        return {row["step"]: float(row[key]) for row in self.rows if is_number(row.get(key))}

    @property
    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty before the end of the run."""
        summary = self.folder.summary
        return json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}

    def trajectories(self, kind: str = "train") -> Iterator[Trajectory]:
        """Yield the stored trajectories of a kind: train, disagree, eval_greedy or eval_sampled. Lines that cannot be
        read are left out."""
        for file in sorted(self.folder.trajectories.glob(f"{kind}_*.jsonl")):
            yield from (stored.trajectory for stored in read(file) if stored.trajectory is not None)

    @cached_property
    def spans(self) -> list[dict[str, Any]]:
        """Spans of timeline.jsonl; empty if the file is missing."""
        spans = MetricsLog(self.folder.timeline).read()
        return [span for span in spans if is_number(span.get("start")) and is_number(span.get("end"))]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of the runs among and below `paths`, each once, sorted by name below each path.

    Raises:
        UserError: A path does not exist, or holds no run.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"{path} is no folder; give the folder of a run, or one that holds runs")
        below = list(_runs(path, LEVELS))
        if not below:
            raise UserError(
                f"{path} holds no run (a folder with metrics.jsonl that is no evaluation), nor do the folders up to "
                f"{LEVELS} levels below it; give the run_dir of a training"
            )
        for run in below:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs(path: Path, levels: int) -> Iterator[Path]:
    if RunDir(path).is_evaluation:
        return  # the models of an evaluation are not runs
    if RunDir(path).metrics.is_file():
        yield path
    elif levels:
        for folder in sorted(path.iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                yield from _runs(folder, levels - 1)


def read_run(path: Path) -> Run:
    """Read the run in a folder.

    Raises:
        UserError: config.yaml or metrics.jsonl cannot be read.
    """
    rows = {int(row["step"]): row for row in MetricsLog(RunDir(path).metrics).read()}  # the last row of a step wins
    return Run(path, read_settings(RunDir(path).config), [rows[step] for step in sorted(rows)])


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a config.yaml by dotted key, merged over the defaults of the schema; only the defaults if
    the file does not exist."""
    given = flat(read_config(path)) if path.is_file() else {}
    defaults = flat(OmegaConf.to_container(OmegaConf.structured(Config), resolve=False))
    return {**{key: value for key, value in defaults.items() if not _is_open(value)}, **given}


def _is_open(value: Any) -> bool:
    """Whether a default has no value without a run: it is missing or an interpolation."""
    return isinstance(value, str) and (value == "???" or "${" in value)


def measured(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs that have a row of metrics, and the runs that have none yet."""
    return [run for run in runs if run.rows], [run for run in runs if not run.rows]
