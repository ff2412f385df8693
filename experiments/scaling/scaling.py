"""Simulates the time of a training step on 8 to 1,024 GPUs, and the share of rank 0 in it.

    python experiments/scaling/scaling.py                      results.csv, results.md and scaling.png, in minutes
    python experiments/scaling/scaling.py --gpus 8 16 --workloads tools --steps 2 --out DIR
    python experiments/scaling/scaling.py --draw               tables and picture of an existing results.csv

No GPU was available. `costs.yaml` has all costs and their sources.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from costs import LEADER, Costs
from hardware import Hardware
from job import Job, Plan
from workload import WORKLOADS

FOLDER = Path(__file__).parent
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
ARMS: dict[str, dict[str, Any]] = {
    "taking turns": {"lag": 0},
    "K = 1": {"lag": 1},
    "K = 2": {"lag": 2},
    "K = 4": {"lag": 4},
    "K = 1, requeue": {"lag": 1, "on_stale": "requeue"},
    "taking turns, all GPUs shared": {"lag": 0, "colocated": True},
    "K = 1, workers": {"lag": 1, "has_workers": True},
    "K = 4, workers": {"lag": 4, "has_workers": True},
}
EVERYWHERE = ("taking turns", "K = 1", "K = 4", "K = 1, workers", "K = 4, workers")
"""Arms that are simulated at every size; the other arms only at `COMPARED` GPUs."""
COMPARED = 32
CHOSEN_AT = 32
"""Number of GPUs at which the best split between servers and trainers is searched; all other sizes have the same split.
"""
SHARES = (0.5, 0.625, 0.75)
"""Shares of the GPUs for servers that are compared."""
STUDIED = "K = 1"
"""Arm that is also simulated without parts of rank 0."""
WITH_WORKERS = "K = 1, workers"
"""The same arm with rollout workers."""


@dataclass(frozen=True)
class Row:
    """One run. All seconds are means per measured step."""

    workload: str
    arm: str
    gpus: int
    free: str
    """Parts of rank 0 that cost nothing."""
    share: float
    """Share of the GPUs that servers have."""
    step: float
    """Seconds of a step."""
    waiting: float
    """Seconds in which the trainers waited for groups."""
    update: float
    """Seconds of the update."""
    paused: float
    """Seconds in which servers were paused for new weights."""
    tokens_per_gpu: float
    """Number of sampled tokens per second and GPU."""
    age: float
    """Mean age of the groups in steps."""
    oldest: int
    """Greatest age of a group in steps."""
    requeued: int
    """Number of groups that were dropped because of their age."""
    workers: int = 0
    """Number of rollout workers."""
    workers_busy: float = 0.0
    """Mean share of the time in which the interpreter of a rollout worker is busy."""
    turns: float = 0.0
    answers: float = 0.0
    choosing: float = 0.0
    credit: float = 0.0
    handout: float = 0.0
    handout_network: float = 0.0
    telling: float = 0.0
    calls: float = 0.0
    host: float = 0.0
    broadcast: float = 0.0
    memory_gib: float = 0.0

    @property
    def interpreter(self) -> float:
        """Share of the step in which rank 0's interpreter is busy."""
        work = (self.turns, self.answers, self.choosing, self.credit, self.handout, self.telling, self.calls)
        return sum(work) / self.step


KINDS = {
    "turns": "turns",
    "answers": "answers",
    "choosing": "choosing",
    "credit": "credit",
    "handout": "hand-out",
    "handout_network": "hand-out, network",
    "telling": "telling",
    "calls": "weights, calls",
    "host": "weights, host",
    "broadcast": "weights, network",
}
"""Kind of work in a `Job` for each column of seconds."""


@dataclass(frozen=True)
class Task:
    """Settings of one run."""

    workload: str
    arm: str
    gpus: int
    share: float
    steps: int
    free: tuple[str, ...] = ()
    seed: int = 0

    def run(self) -> Row:
        """Simulate a warm-up of K + 2 steps, and then whole rounds of K + 1 steps, since groups that begin together are
        trained in one round."""
        arm = ARMS[self.arm]
        plan = Plan(WORKLOADS[self.workload], self.gpus, share=self.share, **arm)
        count = -(-self.steps // (plan.lag + 1)) * (plan.lag + 1)
        hardware = Hardware(Costs.read(FOLDER / "costs.yaml").without(self.free))
        job = Job(plan, hardware, self.seed)
        job.run(plan.lag + 2)
        before, busy = job.leader.spent + job.spent, job.busy_workers
        done = job.run(plan.lag + 2 + count)
        steps, spent = done[-count:], job.leader.spent + job.spent - before
        seconds = fmean(step.seconds for step in steps)
        load = hardware.load(plan, [e for group in job.last for e in group.episodes])
        return Row(
            workload=self.workload,
            arm=self.arm,
            gpus=self.gpus,
            free=" ".join(self.free),
            share=1.0 if plan.colocated else self.share,
            step=seconds,
            waiting=fmean(step.waited for step in steps),
            update=fmean(step.updated for step in steps),
            paused=fmean(step.paused for step in steps),
            tokens_per_gpu=fmean(step.sampled for step in steps) / seconds / self.gpus,
            age=fmean(age for step in steps for age in step.ages),
            oldest=max(age for step in done for age in step.ages),
            requeued=job.requeued,
            workers=plan.workers,
            workers_busy=(job.busy_workers - busy) / (count * seconds),
            **{name: spent[kind] / count for name, kind in KINDS.items()},
            memory_gib=hardware.memory(plan, load) / 2**30,
        )


def best_shares(workloads: Sequence[str], steps: int, pool: ProcessPoolExecutor) -> dict[tuple[str, str], float]:
    """Return the split of GPUs with the shortest step, for each workload and arm of `EVERYWHERE`. Other arms get the
    split of `STUDIED`."""
    tasks = [Task(w, arm, CHOSEN_AT, share, steps) for w in workloads for arm in EVERYWHERE for share in SHARES]
    found: dict[tuple[str, str], Row] = {}
    for row in pool.map(Task.run, tasks):
        key = (row.workload, row.arm)
        if key not in found or row.step < found[key].step:
            found[key] = row
    return {(w, arm): found.get((w, arm), found[w, STUDIED]).share for w in workloads for arm in ARMS}


def tasks_of(
    workloads: Sequence[str], gpus: Sequence[int], steps: int, shares: dict[tuple[str, str], float]
) -> Iterable[Task]:
    """Yield the runs of every arm. Yield those of the studied arm without the costs of rank 0 at every size, and at the
    greatest size those without each part, with and without rollout workers."""
    for workload in workloads:
        for arm in ARMS:
            share = shares[workload, arm]
            for size in gpus:
                if arm in EVERYWHERE or size == COMPARED:
                    yield Task(workload, arm, size, share, steps)
                if arm == STUDIED:
                    yield Task(workload, arm, size, share, steps, LEADER)
            if arm in (STUDIED, WITH_WORKERS):
                yield from (Task(workload, arm, max(gpus), share, steps, (part,)) for part in LEADER)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            line = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
            writer.writerow(line)


def read_csv(path: Path) -> list[Row]:
    kinds = {"str": str, "int": int, "float": float}
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})
            for line in csv.DictReader(file)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(GPUS))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=4, help="least measured steps, after a warm-up of K + 2")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--draw", action="store_true", help="simulate nothing, draw an existing results.csv")
    args = parser.parse_args()
    from drawing import draw, tables  # matplotlib, which the simulated processes need not load

    if not args.draw:
        args.out.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(args.processes) as pool:
            shares = best_shares(args.workloads, 2, pool)
            rows = []
            for row in pool.map(Task.run, tasks_of(args.workloads, args.gpus, args.steps, shares)):
                rows.append(row)
                label = f"{row.workload}, {row.arm}, {row.gpus} GPUs, free of {row.free or 'nothing'}"
                print(f"{label}: {row.step:.0f} s", flush=True)
        write_csv(rows, args.out / "results.csv")
    rows = read_csv(args.out / "results.csv")
    (args.out / "results.md").write_text(tables(rows), encoding="utf-8")
    draw(rows, args.out / "scaling.png")


if __name__ == "__main__":
    main()
