"""Stored trajectories: which files, line by line, and the row that each of them played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrl.environments.family import Splits
from mtrl.errors import UserError
from mtrl.tracking.run_dir import RunDir, such_as
from mtrl.tracking.trajectories import kind_and_step
from mtrl.types import Row, Trajectory, trajectory_from_dict


@dataclass(frozen=True)
class Stored:
    """One line of a file."""

    file: Path
    line: int
    trajectory: Trajectory | None
    """None: it cannot be read."""
    problem: str = ""

    @property
    def where(self) -> str:
        return f"{self.file.name}:{self.line}"

    @property
    def kind(self) -> str:
        """eval_greedy | eval_sampled | train | the name of the file."""
        return kind_and_step(self.file)[0]


def run_of(path: Path) -> Path | None:
    """The folder of the run that the path is, or that its file is in; None where there is none."""
    folders = [path] if path.is_dir() else [path.parent.parent, path.parent]
    return next((folder for folder in folders if RunDir(folder).config.is_file()), None)


def files_of(path: Path) -> list[Path]:
    """The files of trajectories of a run, or the one file.

    Raises:
        UserError: there are none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give the folder of a run or a JSONL file of trajectories")
    if run_of(path) is None:
        raise UserError(
            f"{path} is no run, for it has no config.yaml; give a JSONL file or the folder of a run{such_as(path)}"
        )
    files = sorted(RunDir(path).trajectories.glob("*.jsonl"))
    if not files:
        raise UserError(f"{path} holds no trajectories; train with trainer.save_trajectories_every=1, or give a file")
    return files


def read(file: Path) -> Iterator[Stored]:
    """Every line that is not empty, the unreadable ones as well."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _stored(file, number, line)


def _stored(file: Path, number: int, line: bytes) -> Stored:
    try:
        return Stored(file, number, _checked(trajectory_from_dict(json.loads(line))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Stored(file, number, None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def _checked(trajectory: Trajectory) -> Trajectory:
    """A line may be JSON of the right keys, and yet hold anything in them."""
    for turn in trajectory.turns:
        if (
            not isinstance(turn.text, str)
            or not isinstance(turn.message, dict)
            or not isinstance(turn.components, dict)
        ):
            raise TypeError("a turn has no text, message or components")
        turn.reward = float(turn.reward)
    trajectory.score = None if trajectory.score is None else float(trajectory.score)
    return trajectory


class Rows:
    """Finds the row of a trajectory by its id: held-out episodes among the held-out rows, others among the others."""

    def __init__(self, splits: Splits):
        self._by_id: dict[str, dict[str, list[Row]]] = {"train": {}, "validation": {}, "test": {}}
        for split, rows in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
            for row in rows:
                self._by_id[split].setdefault(str(row["id"]), []).append(row)

    def find(self, stored: Stored, trajectory: Trajectory) -> Row:
        """
        Raises:
            KeyError: there is no such row, or more than one; its argument says which.
        """
        is_held_out = stored.kind.startswith("eval") or trajectory.group_id.startswith(("eval", "play/test"))
        for split in ("test", "validation", "train") if is_held_out else ("train", "validation", "test"):
            rows = self._by_id[split].get(trajectory.task_id, [])
            if any(row != rows[0] for row in rows):
                raise KeyError(f"{len(rows)} different rows of {split} have the id {trajectory.task_id}")
            if rows:
                return rows[0]
        raise KeyError(f"there is no row with the id {trajectory.task_id}; are data and seed those of the run?")
