"""A sweep as plain values, for JSON and for the viewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrl.sweep.report import Job, Seeds, Sweep

Json = dict[str, Any]


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


def _job(job: Job, keys: Sequence[str], run: str | None) -> Json:
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
