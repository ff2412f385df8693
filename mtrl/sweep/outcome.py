"""What became of a job of a sweep: a file in its folder, written when it starts and when it ends."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mtrl.tracking.files import replace_text, to_strict_json
from mtrl.view.kept import read

JOB = "job.json"
LARGEST = 2**20
"""Bytes."""
LONGEST = 2000
"""Characters of the reason why a job failed."""
OWN = ("run_dir", "resume", "sweep")
"""Overrides that say where a run is kept and what else runs: no part of what it was made of."""
DIRECTIONS = ("maximize", "minimize")
STATUSES = ("running", "finished", "pruned", "failed", "interrupted")


@dataclass
class Outcome:
    """One job: what it was, and how it ended."""

    number: int
    overrides: list[str]
    """Those that make this job, without its folder."""
    objective: str
    """The key of summary.json that the sweep is about."""
    direction: str = "maximize"
    """maximize | minimize"""
    status: str = "running"
    """running | finished | pruned | failed | interrupted"""
    said: str = ""
    """Why it was pruned or failed, or which signal ended it."""
    value: float | None = None
    """Its objective; of a pruned job what it had reached."""
    started: float = 0.0
    """Unix time; of a job that goes on, less the seconds that it had taken before."""
    ended: float | None = None

    @classmethod
    def begin(
        cls, number: int, overrides: Sequence[str], objective: str, direction: str, taken: float = 0.0
    ) -> Outcome:
        """`taken`: seconds of an earlier start that this one goes on from."""
        return cls(number, own(overrides), objective, direction, started=time.time() - taken)

    @property
    def seconds(self) -> float | None:
        """Of wall time, once it has ended."""
        return None if self.ended is None else max(0.0, self.ended - self.started)

    def end(self, status: str, said: str = "", value: float | None = None) -> None:
        self.status, self.said, self.ended = status, said[:LONGEST], time.time()
        self.value = None if value is None or not math.isfinite(value) else value

    def write(self, folder: Path) -> None:
        """Write it into the folder of its run, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / JOB, to_strict_json(asdict(self), indent=2) + "\n")


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of the job in this folder; None where there is none that can be read. Whoever made the folder may
    have written anything."""
    try:
        found = json.loads(read(folder / JOB, folder, LARGEST))
        return Outcome(**{field.name: _KINDS[field.name](found[field.name]) for field in fields(Outcome)})
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def own(overrides: Sequence[str]) -> list[str]:
    """The overrides that make a run, without those that say where it is kept or that it is one of many."""
    return [word for word in overrides if re.sub(r"^[+~]*", "", word).partition("=")[0] not in OWN]


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _time(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError("a time is wanted")
    return float(value)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list):
        raise TypeError("a list of texts is wanted")
    return [str(value) for value in values]


def _one_of(known: Sequence[str]) -> Any:
    def choose(value: Any) -> str:
        if value not in known:
            raise ValueError(f"{value!r:.80} is none of {', '.join(known)}")
        return str(value)

    return choose


_KINDS = {
    "number": int,
    "overrides": _texts,
    "objective": str,
    "direction": _one_of(DIRECTIONS),
    "status": _one_of(STATUSES),
    "said": str,
    "value": _number,
    "started": _time,
    "ended": _number,
}
