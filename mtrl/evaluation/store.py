"""The stored episodes of an evaluation: they survive a kill at any instant, and are not run again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mtrl.errors import UserError
from mtrl.types import FAILED, Group, Row, Trajectory, to_json, trajectory_from_dict
from mtrl.utils.files import replace_text

_PLACE = re.compile(r"eval/\w+/(\d+)")


def group_name(kind: str, place: int) -> str:
    """Return the name of the group of row `place`. It is the same for all models, so that their random streams are the
    same."""
    return f"eval/{kind}/{place}"


class Store:
    """Files `trajectories/<label>_<kind>.jsonl` of every model: one trajectory per line, with the lines of a group
    together."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, label: str, kind: str) -> Path:
        return self.folder / f"{label}_{kind}.jsonl"

    def read(self, label: str, kind: str, rows: Sequence[Row], samples: int) -> dict[int, Group]:
        """Return the whole groups by the index of their row. Groups with a failed episode are left out, so that they
        are run again.

        Raises:
            UserError: The file holds something other than episodes of these rows.
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
        """Append a group in one write."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path(label, kind).open("ab") as file:
            file.write(_text([group]).encode())

    def replace(self, label: str, kind: str, groups: Mapping[int, Group]) -> None:
        """Replace the file by these groups, in the order of the rows, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.path(label, kind), _text(group for _, group in sorted(groups.items())))


def _text(groups: Iterable[Group]) -> str:
    """Return one line per trajectory. Text that UTF-8 cannot hold (half of a surrogate pair, as in the message of an
    error) is written as `\\u` escapes, without loss."""
    text = "".join(to_json(trajectory) + "\n" for group in groups for trajectory in group.trajectories)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _lines(path: Path, rows: Sequence[Row]) -> Iterable[tuple[int, Trajectory]]:
    """Yield the trajectory of each whole line with the index of its row. A last line without a line end is left out,
    because a kill interrupted its write."""
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
