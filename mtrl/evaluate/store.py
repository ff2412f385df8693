"""The folder of an evaluation: what was played survives a kill at any instant, and is not played again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mtrl.errors import UserError
from mtrl.tracking.files import replace_text
from mtrl.types import FAILED, Group, Row, Trajectory, to_json, trajectory_from_dict

LOCK = ".lock"
_PLACE = re.compile(r"eval/\w+/(\d+)")


def group_name(kind: str, place: int) -> str:
    """Names the group of row `place`; the same for all models, so that their random streams are the same as well."""
    return f"eval/{kind}/{place}"


class Store:
    """`trajectories/<label>_<kind>.jsonl` of every model: one trajectory per line, the lines of a group together."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, label: str, kind: str) -> Path:
        return self.folder / f"{label}_{kind}.jsonl"

    def read(self, label: str, kind: str, rows: Sequence[Row], samples: int) -> dict[int, Group]:
        """The groups that are whole, by place of their row. Those with a failed episode are not: they are tried again.

        Raises:
            UserError: the file holds something else than episodes of these rows.
        """
        path = self.path(label, kind)
        found: dict[int, dict[int, Trajectory]] = {}
        for place, trajectory in _lines(path, rows):
            found.setdefault(place, {})[trajectory.index] = trajectory
        whole = {}
        for place, by_index in found.items():
            trajectories = [by_index[index] for index in sorted(by_index)]
            if len(trajectories) == samples and not any(t.stop_reason in FAILED for t in trajectories):
                whole[place] = Group(group_name(kind, place), rows[place], trajectories)
        return whole

    def append(self, label: str, kind: str, group: Group) -> None:
        """A group, in one write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(label, kind).open("ab") as file:
            file.write(_text([group]).encode())

    def replace(self, label: str, kind: str, groups: Mapping[int, Group]) -> None:
        """All groups, in the order of the rows, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.path(label, kind), _text(group for _, group in sorted(groups.items())))


def _text(groups: Iterable[Group]) -> str:
    return "".join(to_json(trajectory) + "\n" for group in groups for trajectory in group.trajectories)


def _lines(path: Path, rows: Sequence[Row]) -> Iterable[tuple[int, Trajectory]]:
    """Every whole line with the place of its row. A last line without an end was being written when it was killed."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                trajectory = trajectory_from_dict(json.loads(line))
                found = _PLACE.fullmatch(trajectory.group_id)
                place = int(found[1]) if found else -1
                known = 0 <= place < len(rows) and str(rows[place]["id"]) == trajectory.task_id
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UserError(f"{path}:{number} is no trajectory ({error}); remove the line, or the file") from error
            if not known:
                raise UserError(
                    f"{path}:{number} is an episode of row {trajectory.task_id}, which is not in this evaluation; the "
                    "data has changed: name another evaluation.output"
                )
            yield place, trajectory


class Lock:
    """Held while an evaluation writes into its folder; the system frees it when the process ends, however it does."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file: int | None = None

    def __enter__(self) -> Lock:
        """
        Raises:
            UserError: another process holds it.
        """
        import fcntl

        self._file = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise UserError(
                f"evaluation.output={self.folder} is being written by another evaluation; wait for it, or name another"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
