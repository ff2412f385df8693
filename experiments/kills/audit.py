"""What must hold of the folder of a run that was killed: whole checkpoints, and no group trained twice or lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrl.command.compose import compose
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.record.run_dir import RunDir
from mtrl.trainer.checkpoint.checkpoint import Checkpoint, Checkpoints, read_checkpoint
from mtrl.trainer.checkpoint.tensors import read_tensors, tensor_names
from mtrl.trainer.data.sampler import RowStream
from mtrl.types import group_from_dict, read_trajectories

Drawn = tuple[str, str]
"""A group as it was drawn: its id, and that of its row."""


@dataclass
class Plan:
    """Which rows a run draws, in which order: every group that it may train has its place here."""

    rows: list[str]
    """Ids, in the order in which they are drawn."""
    batch: int
    steps: int
    lag: int
    """How many updates old a trained token may be."""

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Plan:
        """Of a run with these overrides in which no group fails."""
        config: Any = compose(list(overrides))
        batch, steps, lag = (
            config.trainer.prompts_per_step,
            config.trainer.max_steps,
            config.async_config.max_steps_off_policy,
        )
        stream = RowStream(load_task(config).splits.train, config.seed)
        return cls([stream.next()["id"] for _ in range(batch * (steps + lag + 1))], batch, steps, lag)

    def drawn(self, groups: int) -> list[Drawn]:
        """The first `groups` of them."""
        return [(f"step{n // self.batch}/{n % self.batch}", self.rows[n]) for n in range(groups)]


@dataclass
class Audit:
    """What was looked at, and what was wrong with it."""

    checkpoints: int = 0
    corrupt: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    """Groups, or rows, that were trained twice, or trained and still stored for training."""
    lost: list[str] = field(default_factory=list)
    """Rows that were drawn before these, and neither trained nor stored."""
    differences: list[str] = field(default_factory=list)
    """From what an undisturbed run says."""

    @property
    def faults(self) -> list[str]:
        """All of them, in words."""
        kinds = {"corrupt": self.corrupt, "twice": self.doubled, "lost": self.lost, "different": self.differences}
        return [f"{kind}: {fault}" for kind, faults in kinds.items() for fault in faults]

    def compare(self, found: Iterable[Drawn], planned: Sequence[Drawn]) -> None:
        """Every group and every row of `planned` is to be found once."""
        groups = list(found)
        for place in (0, 1):
            times = Counter(group[place] for group in groups)
            self.doubled += [name for name, count in times.items() if count > 1]
            self.lost += [group[place] for group in planned if not times[group[place]]]
        self.differences += [
            f"{group[0]} on row {group[1]} was not drawn yet" for group in groups if group not in planned
        ]


def audit_killed(run_dir: Path, plan: Plan) -> Audit:
    """The folder as a kill left it: every checkpoint is read as a whole, and the newest one accounts, with the steps
    before it, for all that was drawn."""
    audit, newest = Audit(), None
    for path in Checkpoints(run_dir / "checkpoints").all():
        audit.checkpoints += 1
        try:
            newest = read_whole(path)
        except UserError as error:
            audit.corrupt.append(str(error))
    if newest is not None:
        stored = [entry["group"] for entry in newest.groups if "group" in entry]
        groups = [(group["group_id"], group["row"]["id"]) for group in stored]
        groups += [group for step in range(1, newest.state["step"] + 1) for group in trained(run_dir, step)]
        audit.compare(groups, plan.drawn(newest.state["rows_drawn"]))
    return audit


def audit_finished(run_dir: Path, plan: Plan, undisturbed: Path | None = None) -> Audit:
    """The folder of a run that has come to its end: every planned group was trained, once, and no token too late; and
    where an undisturbed run says exactly what this one must say, it does."""
    audit = audit_killed(run_dir, plan)
    steps = [group for step in range(1, plan.steps + 1) for group in trained(run_dir, step)]
    audit.compare(steps, plan.drawn(plan.batch * plan.steps))
    rows = metrics(run_dir)
    if [row["step"] for row in rows if row["step"]] != list(range(1, plan.steps + 1)):
        audit.differences.append(f"metrics.jsonl has the steps {[row['step'] for row in rows]}")
    stale = [row["step"] for row in rows if row.get("analysis/staleness/max", 0) > plan.lag]
    audit.differences += [f"step {step} trained a token that was too old" for step in stale]
    if undisturbed is not None:
        expected = metrics(undisturbed)
        audit.differences += [f"metrics of step {a['step']}" for a, b in zip(rows, expected, strict=False) if a != b]
        if weights(run_dir) != weights(undisturbed):
            audit.differences.append("the weights at the end")
    return audit


def read_whole(path: Path) -> Checkpoint:
    """Everything that a checkpoint holds.

    Raises:
        UserError: a part of it is missing or damaged.
    """
    checkpoint = read_checkpoint(path)
    for part in {name.partition(".")[0] for name in tensor_names(path)}:
        read_tensors(path, part)
    for entry in checkpoint.groups:
        if "group" in entry:
            group_from_dict(entry["group"])
    return checkpoint


def trained(run_dir: Path, step: int) -> list[Drawn]:
    """The groups that training step `step` (from 1) learnt from, as the run stored them."""
    path = RunDir(run_dir).trajectories / f"train_step_{step:06d}.jsonl"
    found = ((t.group_id, t.task_id) for t in read_trajectories(path)) if path.exists() else ()
    return list(dict.fromkeys(found))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Without what a clock decides."""
    rows = map(json.loads, RunDir(run_dir).metrics.read_text(encoding="utf-8").splitlines())
    return [{key: row[key] for key in row if not key.startswith(("time/", "perf/"))} for row in rows]


def weights(run_dir: Path) -> bytes:
    """What the run has exported."""
    return (RunDir(run_dir).export / "model.safetensors").read_bytes()
