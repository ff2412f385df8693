"""The data of a run that the rules read: its configuration, its metrics as columns, and its trajectories on demand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_origin

import numpy as np

from mtrl.config import keys
from mtrl.config.messages import wrong_type
from mtrl.config.source_weights import read_weight, shares_of
from mtrl.errors import UserError
from mtrl.record.records import number_of
from mtrl.record.run import Run
from mtrl.record.run_dir import RunDir
from mtrl.record.trajectories import kind_and_step

T = TypeVar("T")

LEAST_WINDOW = 5
"""Minimum length of a window, in steps, however short the run."""


@dataclass(frozen=True)
class Series:
    """One metric: the steps that have it, and its values there."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def last(self, count: int) -> Series:
        return Series(self.steps[-count:], self.values[-count:]) if count else Series(self.steps[:0], self.values[:0])

    def first(self, count: int) -> Series:
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: int) -> Series:
        """Return the part from `step` on."""
        late = self.steps >= step
        return Series(self.steps[late], self.values[late])

    def until(self, step: int) -> Series:
        """Return the part up to and including `step`."""
        early = self.steps <= step
        return Series(self.steps[early], self.values[early])


@dataclass
class _Column:
    """Compact storage of one metric: 16 bytes per step, copied as a block when a rule reads it."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class Record:
    """A run as the rules see it. `add` appends rows while the run goes on."""

    def __init__(self, config: Mapping[str, Any], path: Path | None = None, rows: Iterable[Mapping[str, Any]] = ()):
        """
        Args:
            config: Content of config.yaml; missing keys have the schema's defaults.
            path: The folder of the run; None: there is no folder, so there are no trajectories.
        """
        self.config, self.path = config, path
        self.step = 0
        """Last step of the rows so far."""
        self._columns: dict[str, _Column] = {}
        self._series: dict[str, Series] = {}
        self._memory: dict[Hashable, Any] = {}
        for row in rows:
            self.add(row)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Load a run from disk. The run may still be running.

        Raises:
            UserError: The run does not exist or cannot be read.
        """
        run = Run.open(path)
        if run.dir.is_evaluation:
            report = path / "report.html"
            raise UserError(f"{path} is an evaluation, and {report} describes it; give the folder of a run")
        run.warn_of_changes()
        return cls(run.config, path, run.metrics.read_all())

    # -- growing -----------------------------------------------------------------------------------------------------

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of one step, which may extend an earlier row of the same step. Values that are not finite numbers
        are left out."""
        step = int(row["step"])
        self.step = max(self.step, step)
        self._series.clear()
        for key, value in row.items():
            if (number := number_of(value)) is not None:
                column = self._columns.setdefault(key, _Column())
                column.steps.append(step)
                column.values.append(number)

    def forget(self, step: int) -> None:
        """Remove all values after `step`, from which the run continues."""
        self._series.clear()
        self.step = min(self.step, step)
        for column in self._columns.values():
            while column.steps and column.steps[-1] > step:
                column.steps.pop()
                column.values.pop()

    # -- reading -----------------------------------------------------------------------------------------------------

    def series(self, key: str) -> Series:
        """Return a metric; the series is empty if it was never measured."""
        if key not in self._series:
            column = self._columns.get(key, _Column())
            self._series[key] = Series(np.array(column.steps, int), np.array(column.values, float))
        return self._series[key]

    def metrics(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of the measured metrics that begin with `prefix`."""
        return sorted(key for key, column in self._columns.items() if column.steps and key.startswith(prefix))

    def has(self, key: str) -> bool:
        return len(self.series(key)) > 0

    def setting(self, path: str) -> Any:
        """Return the value of a key in the run's configuration, else the schema's default.

        Raises:
            UserError: The value, or that of a section above it, has another type than the schema's.
        """
        found: Any = self.config
        names = path.split(".")
        for depth, name in enumerate(names):
            if found is not None and not isinstance(found, Mapping):
                raise self._wrong_type(".".join(names[:depth]), found)
            if found is None or name not in found:
                known = keys.all_keys().get(path)
                return known.default if known else None
            found = found[name]
        if not _fits(keys.all_keys().get(path), found):
            raise self._wrong_type(path, found)
        return found

    def _wrong_type(self, path: str, value: Any) -> UserError:
        return wrong_type(path, value, f"{RunDir(self.path).config}: " if self.path else "")

    @property
    def steps(self) -> int:
        """Number of measured training steps."""
        return len(self.series("rollout/reward/mean"))

    @property
    def window(self) -> int:
        """Number of steps that one decision examines: `diagnosis.window`, or less for a short run."""
        planned = max(int(self.setting("trainer.max_steps") or 0), self.step)
        return max(LEAST_WINDOW, min(int(self.setting("diagnosis.window")), planned // 3))

    @property
    def is_over(self) -> bool:
        """Whether the run has done all of its steps."""
        return self.step >= int(self.setting("trainer.max_steps") or 0)

    @property
    def unit(self) -> float:
        """Reward of a success, which is the unit for changes of the reward."""
        claim = self.setting("evaluation.claim_threshold")
        claim = self.setting("evaluation.success_threshold") if claim is None else claim
        return float(claim) if claim and claim > 0 else 1.0

    @property
    def episodes(self) -> int:
        """Number of episodes per training step; in a mixture its mean with the weights of the first rows."""
        size, sources = int(self.setting("algorithm.group_size")), self.setting("environments") or {}
        shares = shares_of({name: read_weight(name, own.get("weight", 1.0)) for name, own in sources.items()}, 0)
        sizes = {name: (own.get("algorithm") or {}).get("group_size", size) for name, own in sources.items()}
        mean = sum(shares[name] * sizes[name] for name in sources) if sources else size
        return max(1, round(int(self.setting("trainer.prompts_per_step")) * mean))

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the cached result of `make`. It is for costly results that do not change, because the live diagnosis
        requests them after every step."""
        if key not in self._memory:
            self._memory[key] = make()
        found: T = self._memory[key]
        return found

    def files(self, *kinds: str, since: int = 0, until: int | None = None) -> list[Path]:
        """Return the files of trajectories of these kinds (`train`, `disagree`, `eval_greedy`, …), the newest step
        first. The files are written whole and do not change.
        """
        if self.path is None:
            return []
        found = []
        for file in Run(self.path).files():
            kind, step = kind_and_step(file)
            if kind in kinds and step is not None and since <= step <= (self.step if until is None else until):
                found.append((-step, kinds.index(kind), file))
        return [file for _, _, file in sorted(found)]


def _fits(key: keys.Key | None, value: Any) -> bool:
    """Whether a value of config.yaml has the type of its key. Every plain value fits a text, as YAML reads the text `3`
    as a number. Open keys, and keys that the schema does not have, fit: their readers check them."""
    if key is None or key.is_open:
        return True
    if value is None:
        return key.optional
    kind = get_origin(key.type) or key.type
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    is_mapping, is_list = isinstance(value, Mapping), isinstance(value, list | tuple)
    if key.is_section:
        return is_mapping
    return (
        is_list if kind in (list, tuple) else isinstance(value, bool) if kind is bool else not (is_mapping or is_list)
    )
