"""The sweeps among the shown runs, with their jobs from the best to the worst."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrl.record.runs import Run
from mtrl.sweep.report import Job, Sweep, ranked, read_job

Json = dict[str, Any]


def sweeps_of(runs: Sequence[Run]) -> list[Sweep]:
    """Return the sweeps in the order of the runs. A sweep is the runs of one folder that are jobs."""
    found: dict[Path, list[Job]] = {}
    for run in runs:
        if (job := read_job(run.path, run)) is not None:
            found.setdefault(run.path.parent, []).append(job)
    return [Sweep(folder, ranked(jobs)) for folder, jobs in found.items()]
