"""The report of a sweep in the terminal."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape as without_markup
from rich.table import Table

from mtrl.sweep.sweep_runs import Seeds, Sweep, SweepRun
from mtrl.utils.text import clean, short

PIPED = 160
"""Width of the output in columns, if it is no terminal."""


def show(sweep: Sweep) -> None:
    """Print the table, the best job first; then the means over seeds, the failed jobs with reasons, and the best job's
    command."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED)
    pruned = len(sweep.with_status("pruned"))
    counts = f"{len(sweep.jobs)} jobs" + (f", {pruned} of them pruned" if pruned else "")
    console.print(f"{escape(str(sweep.folder))}: {counts}", soft_wrap=True)
    console.print(job_table(sweep))
    if families := sweep.over_seeds():
        console.print(seed_table(sweep, families))
    for job in sweep.jobs:
        if job.outcome.said and job.status != "pruned":
            console.print(f"[red]job {job.number} {job.status}[/]: {escape(job.outcome.said)}", soft_wrap=True)
    if (best := sweep.best) is None:
        console.print(f"no job has finished with a {escape(sweep.objective)}", soft_wrap=True)
        return
    console.print(f"[bold]best[/]: job {best.number} in {escape(str(best.folder))}; again with:", soft_wrap=True)
    console.print(f"  {escape(best.command)}", soft_wrap=True)


def job_table(sweep: Sweep) -> Table:
    headings = ["job", *map(brief, sweep.keys), sweep.objective, "steps", "seconds", "status"]
    table = Table(*map(escape, headings))
    for job in sweep.jobs:
        table.add_row(*map(escape, cells(job, sweep.keys)), style="bold" if job is sweep.best else None)
    return table


def cells(job: SweepRun, keys: Sequence[str]) -> list[str]:
    settings = [rounded(job.settings.get(key, "")) for key in keys]
    steps = "–" if job.steps is None else f"{job.steps} / {job.max_steps or '?'}"
    return [str(job.number), *settings, number(job.value), steps, number(job.seconds), job.status]


def seed_table(sweep: Sweep, families: Sequence[Seeds]) -> Table:
    keys = list(families[0].settings)
    table = Table(*map(escape, [*map(brief, keys), f"mean {sweep.objective}", "±", "seeds"]))
    for family in families:
        settings = [rounded(family.settings[key]) for key in keys]
        table.add_row(*map(escape, [*settings, number(family.mean), number(family.deviation), str(family.count)]))
    return table


def brief(key: str) -> str:
    """Return the last two parts of a key."""
    return ".".join(key.split(".")[-2:])


def rounded(text: str) -> str:
    """Return a typed value unchanged, and shorten one with many digits, as samplers generate them."""
    return short(float(text)) if re.fullmatch(r"-?(?=[\d.]{9})\d*\.\d+(e-?\d+)?", text) else text


def number(value: float | None) -> str:
    return "–" if value is None else short(value)


def escape(text: str) -> str:
    """Escape text of unknown origin, so that it contains no markup and no control characters."""
    return without_markup(clean(text))


def resume_command(words: Sequence[str], folder: str) -> str:
    """Return the command that resumes a stopped sweep. `words` are those of the original command."""
    others = [word for word in words if not word.startswith(("run_dir=", "resume="))]
    return shlex.join(["mtrl", "train", *others, f"run_dir={folder}", "resume=latest"])
