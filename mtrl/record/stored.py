"""Stored trajectories: their files, their lines, and the row of each trajectory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrl.datasets import Splits
from mtrl.errors import UserError
from mtrl.record.index import list_files
from mtrl.record.run_dir import RunDir, such_as
from mtrl.record.trajectories import kind_and_step
from mtrl.types import Row, Trajectory, trajectory_from_dict


@dataclass(frozen=True)
class StoredLine:
    """One line of a file of trajectories."""

    file: Path
    line: int
    trajectory: Trajectory | None
    """The trajectory; None if the line cannot be read."""
    problem: str = ""

    @property
    def where(self) -> str:
        return f"{self.file.name}:{self.line}"

    @property
    def kind(self) -> str:
        """Kind of the trajectory: eval_greedy | eval_sampled | train | the name of the file."""
        return kind_and_step(self.file)[0]


def files_of(path: Path) -> list[Path]:
    """Return the trajectory files of a run, or the file itself.

    Raises:
        UserError: the path does not exist, is no run, or holds no trajectories.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist; give the folder of a run or a JSONL file of trajectories")
    if not RunDir(path).config.is_file():
        raise UserError(
            f"{path} is no run, for it has no config.yaml; give a JSONL file or the folder of a run{such_as(path)}"
        )
    files = sorted(Path(entry.path) for entry in list_files(path)[0])
    if not files:
        raise UserError(f"{path} holds no trajectories; train with trainer.save_trajectories_every=1, or give a file")
    return files


def read(file: Path) -> Iterator[StoredLine]:
    """Yield every line that is not empty, including unreadable ones."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _stored(file, number, line)


def _stored(file: Path, number: int, line: bytes) -> StoredLine:
    try:
        return StoredLine(file, number, _checked(trajectory_from_dict(json.loads(line))))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return StoredLine(file, number, None, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")


def _checked(trajectory: Trajectory) -> Trajectory:
    """Check the types of a trajectory's values, because a line may have the right keys but arbitrary values."""
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


class RowFinder:
    """Finds the row of a trajectory by its id: for held-out episodes the held-out rows are searched first, for others
    the training rows."""

    def __init__(self, splits: Splits):
        self._by_id: dict[str, dict[str, list[Row]]] = {"train": {}, "validation": {}, "test": {}}
        for split, rows in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
            for row in rows:
                self._by_id[split].setdefault(str(row["id"]), []).append(row)

    def find(self, stored: StoredLine, trajectory: Trajectory) -> Row:
        """Return the row of a trajectory.

        Raises:
            KeyError: there is no such row, or more than one; its argument is the message.
        """
        is_held_out = stored.kind.startswith("eval") or trajectory.group_id.startswith(("eval", "play/test"))
        for split in ("test", "validation", "train") if is_held_out else ("train", "validation", "test"):
            rows = self._by_id[split].get(trajectory.task_id, [])
            if any(row != rows[0] for row in rows):
                raise KeyError(f"{len(rows)} different rows of {split} have the id {trajectory.task_id}")
            if rows:
                return rows[0]
        raise KeyError(f"there is no row with the id {trajectory.task_id}; are data and seed those of the run?")
