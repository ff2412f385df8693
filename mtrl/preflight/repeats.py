"""Repetition of the same actions: in fresh processes, and in this process in other orders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtrl.config.schema import Config
from mtrl.preflight.stage import Script, ScriptedEpisode, Stage, scripted
from mtrl.types import Row

Transcript = list[Any]
"""See `ScriptedEpisode.transcript`."""

ZONES = ("AAA-14", "BBB+10")
"""POSIX time zones that are never on the same day, so that a local date in an observation differs between processes. (A
UTC date does not differ; the local time of day does.)"""
STARTUP = 60.0
"""Seconds that a fresh process may spend on imports and data."""
WINDOW = 40
"""Number of characters to show on either side of the first difference."""


@dataclass(frozen=True)
class Action:
    """The responses for one row."""

    place: tuple[str, int]
    """Split and index of the row."""
    row: Row
    responses: list[str]
    label: str

    def script(self, number: int) -> Script:
        return Script(self.row, scripted(self.responses), str(number))


@dataclass
class Repeats:
    """Fixed actions, which are repeated in fresh processes when the object is created, and their transcripts.

    Raises:
        RuntimeError: a process ended with an error, or took too long.
    """

    config: Config
    actions: list[Action]
    processes: int
    seconds: float
    stage: Stage
    fresh: list[dict[int, Transcript]] = field(init=False)
    """For each process, transcripts by number of the action. The processes differ only in hash seed and time zone.
    Without fresh processes, this process runs every action once."""

    def __post_init__(self) -> None:
        if not self.processes:
            episodes = self.stage.run(action.script(number) for number, action in enumerate(self.actions))
            self.fresh = [{int(episode.label): episode.transcript() for episode in episodes}]
            return
        with tempfile.TemporaryDirectory() as folder:
            self.fresh = self.in_fresh_processes(Path(folder))
        self.stage.tally.left_out += len(self.actions) - len(self.common)

    def in_fresh_processes(self, folder: Path) -> list[dict[int, Transcript]]:
        """Return the transcripts of each fresh process by number of the action; an action that a process did not reach
        in time is missing. The folder is for the files of the processes."""
        (folder / "job.json").write_text(json.dumps(self._job()))
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        running = []
        for number in range(self.processes):
            different = {"PYTHONHASHSEED": str(number + 1), "TZ": ZONES[number % len(ZONES)], "PYTHONPATH": path}
            files = [str(folder / "job.json"), str(folder / f"{number}.json")]
            command = [sys.executable, "-m", "mtrl.preflight.replay", *files]
            errors = (folder / f"{number}.log").open("w")
            running.append(
                subprocess.Popen(
                    command, env=os.environ | different, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL
                )
            )
        try:
            return [self._answer(process, folder / str(number)) for number, process in enumerate(running)]
        finally:
            for process in running:
                process.kill()
                process.wait()

    def _job(self) -> dict[str, Any]:
        actions = [[*action.place, action.responses] for action in self.actions]
        return {
            "config": asdict(self.config),
            "actions": actions,
            "seconds": self.seconds,
            "patience": self.stage.patience,
        }

    def _answer(self, process: subprocess.Popen, path: Path) -> dict[int, Transcript]:
        limit = STARTUP + self.seconds + self.stage.patience
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"a fresh process did not end within {limit:g} s") from None
        if process.returncode:
            lines = path.with_suffix(".log").read_text(errors="replace").strip().splitlines() or ["no message"]
            raise RuntimeError(f"a fresh process ended with {process.returncode}: {lines[-1]}")
        return {int(number): transcript for number, transcript in json.loads(path.with_suffix(".json").read_text())}

    @property
    def common(self) -> list[int]:
        """Numbers of the actions that every fresh process completed in time."""
        return [n for n in self.fresh[0] if all(n in other for other in self.fresh)]

    @property
    def steady(self) -> dict[int, Transcript]:
        """Transcripts on which all fresh processes agree: the reference for runs in other orders."""
        first, *others = self.fresh
        return {n: first[n] for n in self.common if all(other[n] == first[n] for other in others)}

    def unsteady(self) -> list[str]:
        """Return the differences between fresh processes, one sentence per action and process."""
        first, *others = self.fresh
        return [
            f"{self.describe(n)}: {difference(first[n], other[n])}"
            for n in self.common
            for other in others
            if other[n] != first[n]
        ]

    def comparable(self, episodes: Sequence[ScriptedEpisode]) -> list[ScriptedEpisode]:
        """Return the episodes whose action has a steady transcript."""
        steady = self.steady
        return [episode for episode in episodes if int(episode.label) in steady]

    def deviations(self, episodes: Sequence[ScriptedEpisode]) -> list[str]:
        """Return the differences between `comparable` episodes of this process and those of fresh processes."""
        steady = self.steady
        found = [(int(episode.label), episode.transcript()) for episode in episodes]
        return [f"{self.describe(n)}: {difference(steady[n], seen)}" for n, seen in found if steady[n] != seen]

    def describe(self, number: int) -> str:
        action = self.actions[number]
        return f"row {action.row['id']}, {action.label}"


def difference(one: Transcript, other: Transcript) -> str:
    """Return the first turn and field that differ, with excerpts of both texts."""
    for number, (left, right) in enumerate(zip(one, other, strict=False)):
        for name in left.keys() | right.keys():
            if left.get(name) != right.get(name):
                where = _where(number, name, min(len(one), len(other)))
                return f"{where}: {_excerpts(left.get(name), right.get(name))}"
    return f"{len(one) - 1} turns, then {len(other) - 1}"


def _where(number: int, field: str, length: int) -> str:
    """Describe the position of a field. An observation belongs to the turn that it answers; the first one is the
    opening."""
    if field == "observation":
        return f"observation after turn {number}" if number else "opening"
    return f"{field} of turn {number + 1}" if number < length - 1 else f"{field} at the end"


def _excerpts(left: Any, right: Any) -> str:
    one, other = _text(left), _text(right)
    if one == other:  # messages that differ in other keys than their content
        one, other = json.dumps(left), json.dumps(right)
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - WINDOW)
    return " / ".join(repr(text[start : same + WINDOW]) for text in (one, other))


def _text(value: Any) -> str:
    """Return text unchanged, messages as their joined content, and any other value as JSON."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return "".join(f"{message.get('content')}" for message in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
