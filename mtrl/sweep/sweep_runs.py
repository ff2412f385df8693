"""The report of a sweep: its jobs, the best first, and the command that repeats the best one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mtrl.errors import UserError
from mtrl.record.run import Run
from mtrl.sweep.outcome import JobResult, read_outcome

SEED = "seed"
RANKED = ("finished", "pruned")

Json = dict[str, Any]


@dataclass(frozen=True)
class SweepRun:
    """One run of the sweep."""

    folder: Path
    outcome: JobResult
    status: str
    """Status of the outcome; `stopped` if the outcome is `running` but the run has no process (`Run.is_alive`)."""
    steps: int | None
    max_steps: int | None

    @property
    def number(self) -> int:
        return self.outcome.number

    @property
    def value(self) -> float | None:
        return self.outcome.value

    @property
    def seconds(self) -> float | None:
        return self.outcome.seconds

    @cached_property
    def settings(self) -> dict[str, str]:
        """The job's overrides by key."""
        pairs = (word.lstrip("+~").partition("=") for word in self.outcome.overrides)
        return {key: value for key, _, value in pairs}

    @property
    def command(self) -> str:
        """Command that repeats the job in a new folder."""
        return shlex.join(["mtrl", "train", *self.outcome.overrides])


@dataclass(frozen=True)
class Seeds:
    """Jobs that differ only in their seed."""

    settings: Mapping[str, str]
    mean: float
    deviation: float | None
    """Standard deviation of the sample; None for a single job."""
    count: int


@dataclass(frozen=True)
class Sweep:
    """All jobs of a folder."""

    folder: Path
    jobs: Sequence[SweepRun]
    """The jobs, the best first; jobs without a value are last."""

    @property
    def objective(self) -> str:
        return self.jobs[0].outcome.objective

    @property
    def direction(self) -> str:
        return self.jobs[0].outcome.direction

    @cached_property
    def keys(self) -> list[str]:
        """The settings that were swept, in the order in which they were typed."""
        known = dict.fromkeys(key for job in sorted(self.jobs, key=lambda job: job.number) for key in job.settings)
        return [key for key in known if len({job.settings.get(key) for job in self.jobs}) > 1]

    @property
    def best(self) -> SweepRun | None:
        """The best finished job; None if no job has finished with a value."""
        return next((job for job in self.jobs if job.status == "finished" and job.value is not None), None)

    def with_status(self, status: str) -> list[SweepRun]:
        return [job for job in self.jobs if job.status == status]

    def over_seeds(self) -> list[Seeds]:
        """Return the means over seeds, the best first; empty if the seed was not swept, or if only the seed was
        swept."""
        keys = [key for key in self.keys if key != SEED]
        if SEED not in self.keys or not keys:
            return []
        families: dict[tuple[str, ...], list[float]] = {}
        for job in self.with_status("finished"):
            if job.value is not None:
                families.setdefault(tuple(job.settings.get(key, "") for key in keys), []).append(job.value)
        found = [
            Seeds(
                dict(zip(keys, names, strict=True)), fmean(values), stdev(values) if values[1:] else None, len(values)
            )
            for names, values in families.items()
        ]
        return sorted(found, key=lambda family: family.mean, reverse=self.direction == "maximize")


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder.

    Raises:
        UserError: the folder does not exist, or holds no sweep.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; give the folder of a sweep")
    jobs = [job for path in folder.iterdir() if (job := read_job(path)) is not None]
    if not jobs:
        raise UserError(f"{folder} holds no sweep (no folder in it has a job.json); give the folder that -m has made")
    return Sweep(folder, ranked(jobs))


def read_job(folder: Path, run: Run | None = None) -> SweepRun | None:
    """Return the job in a folder; None if the folder holds no job. `run` is the run of the same folder, if the caller
    has it."""
    outcome = read_outcome(folder)
    if outcome is None:
        return None
    run = run or Run(folder)
    died = outcome.status == "running" and not run.is_alive
    return SweepRun(folder, outcome, "stopped" if died else outcome.status, run.step, run.max_steps)


def ranked(jobs: Sequence[SweepRun]) -> list[SweepRun]:
    """Return the jobs, the best first. Pruned jobs come after finished ones, because their values are of fewer
    steps."""
    sign = -1.0 if jobs and jobs[0].outcome.direction == "maximize" else 1.0

    def place(job: SweepRun) -> tuple[int, float, int]:
        if job.value is None or job.status not in RANKED:
            return len(RANKED), math.inf, job.number
        return RANKED.index(job.status), sign * job.value, job.number

    return sorted(jobs, key=place)


def to_plain(sweep: Sweep, ids: dict[Path, str] | None = None) -> Json:
    """Return a sweep as plain values for JSON. `ids` are the ids of the runs in the viewer, by folder."""
    best = sweep.best
    return {
        "name": "/".join(sweep.folder.resolve().parts[-2:]),
        "objective": sweep.objective,
        "direction": sweep.direction,
        "keys": sweep.keys,
        "jobs": [_job(job, sweep.keys, (ids or {}).get(job.folder)) for job in sweep.jobs],
        "seeds": [_seeds(family) for family in sweep.over_seeds()],
        "best": None if best is None else {"number": best.number, "command": best.command},
    }


def _job(job: SweepRun, keys: Sequence[str], run: str | None) -> Json:
    return {
        "number": job.number,
        "run": run,
        "settings": {key: job.settings.get(key) for key in keys},
        "value": job.value,
        "steps": job.steps,
        "max_steps": job.max_steps,
        "seconds": job.seconds,
        "status": job.status,
        "said": job.outcome.said,
    }


def _seeds(family: Seeds) -> Json:
    return {
        "settings": dict(family.settings),
        "mean": family.mean,
        "deviation": family.deviation,
        "count": family.count,
    }
