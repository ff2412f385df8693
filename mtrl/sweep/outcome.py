"""The outcome of a job of a sweep: a file in the job's folder, written when the job starts and when it ends."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mtrl.record.reading import read
from mtrl.record.run_dir import RunDir
from mtrl.utils.files import replace_text, to_strict_json

LARGEST = 2**20
"""Maximum size of an outcome file, in bytes."""
LONGEST = 2000
"""Maximum length of the reason of a failure, in characters."""
OWN = ("run_dir", "resume", "sweep")
"""Keys of overrides that concern the folder of a run or the sweep around it, and not the run itself."""
DIRECTIONS = ("maximize", "minimize")
STATUSES = ("running", "finished", "pruned", "failed", "interrupted")


@dataclass
class JobResult:
    """One job: its settings and its end."""

    number: int
    overrides: list[str]
    """The overrides of this job, without its folder; the flag `--config-dir` of the sweep, if it has one, is first."""
    objective: str
    """The key of summary.json that the sweep optimises."""
    direction: str = "maximize"
    """Direction of the optimisation: maximize | minimize"""
    status: str = "running"
    """Status of the job: running | finished | pruned | failed | interrupted"""
    said: str = ""
    """The reason why the job was pruned or failed, or the signal that ended it."""
    value: float | None = None
    """The job's objective; for a pruned job, its last score."""
    started: float = 0.0
    """Unix time of the start; for a resumed job, minus the seconds that it ran before."""
    ended: float | None = None

    @classmethod
    def begin(
        cls, number: int, overrides: Sequence[str], objective: str, direction: str, taken: float = 0.0
    ) -> JobResult:
        """Return the outcome of a job that starts now. `taken` is the number of seconds that a resumed job ran
        before."""
        return cls(number, own(overrides), objective, direction, started=time.time() - taken)

    @property
    def seconds(self) -> float | None:
        """Wall time of the job, in seconds; None until it has ended."""
        return None if self.ended is None else max(0.0, self.ended - self.started)

    @property
    def is_done(self) -> bool:
        """Whether the job has ended and has nothing left to run."""
        return self.status in ("finished", "pruned")

    def end(self, status: str, said: str = "", value: float | None = None) -> None:
        self.status, self.said, self.ended = status, said[:LONGEST], time.time()
        self.value = None if value is None or not math.isfinite(value) else value

    def write(self, folder: Path) -> None:
        """Write the outcome into the folder of its run, atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(RunDir(folder).job, to_strict_json(asdict(self), indent=2) + "\n")


def read_outcome(folder: Path) -> JobResult | None:
    """Return the outcome of the job in this folder; None if no valid outcome can be read. The content of the folder is
    untrusted."""
    try:
        found = json.loads(read(RunDir(folder).job, folder, LARGEST))
        return JobResult(**{field.name: _KINDS[field.name](found[field.name]) for field in fields(JobResult)})
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def own(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the run itself, without those in `OWN`."""
    return [word for word in overrides if re.sub(r"^[+~]*", "", word).partition("=")[0] not in OWN]


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _time(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError("a time is expected")
    return float(value)


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list):
        raise TypeError("a list of texts is expected")
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
