"""Checks of the folder of a killed run: all checkpoints are complete, and no group was trained twice or lost."""

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
"""A group that a run has drawn: its id, and the id of its row."""


@dataclass
class Plan:
    """The rows that a run draws, in order; each group that it may train has its place here."""

    rows: list[str]
    """Ids of the rows, in the order in which they are drawn."""
    batch: int
    """Number of groups of a training step."""
    steps: int
    """Number of training steps."""
    lag: int
    """Greatest age of a trained token, in updates."""

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Plan:
        """Return the plan of a run with these overrides, if no group fails."""
        config: Any = compose(list(overrides))
        batch, steps, lag = (
            config.trainer.prompts_per_step,
            config.trainer.max_steps,
            config.async_config.max_steps_off_policy,
        )
        stream = RowStream(load_task(config).splits.train, config.seed)
        return cls([stream.next()["id"] for _ in range(batch * (steps + lag + 1))], batch, steps, lag)

    def drawn(self, groups: int) -> list[Drawn]:
        """Return the first `groups` groups."""
        return [(f"step{n // self.batch}/{n % self.batch}", self.rows[n]) for n in range(groups)]


@dataclass
class Audit:
    """Faults of the folder of a run."""

    checkpoints: int = 0
    """Number of checkpoints that were read."""
    corrupt: list[str] = field(default_factory=list)
    """Errors of checkpoints that could not be read."""
    doubled: list[str] = field(default_factory=list)
    """Groups, or rows, that were trained twice, or trained and still stored for training."""
    lost: list[str] = field(default_factory=list)
    """Groups, or rows, that were drawn, and neither trained nor stored."""
    differences: list[str] = field(default_factory=list)
    """Differences from the plan, from the bounds, and from an undisturbed run."""

    @property
    def faults(self) -> list[str]:
        """All faults in words."""
        kinds = {"corrupt": self.corrupt, "twice": self.doubled, "lost": self.lost, "different": self.differences}
        return [f"{kind}: {fault}" for kind, faults in kinds.items() for fault in faults]

    def compare(self, found: Iterable[Drawn], planned: Sequence[Drawn]) -> None:
        """Add a fault for each planned group or row that was not found exactly once, and for each other group."""
        groups = list(found)
        for place in (0, 1):
            times = Counter(group[place] for group in groups)
            self.doubled += [name for name, count in times.items() if count > 1]
            self.lost += [group[place] for group in planned if not times[group[place]]]
        self.differences += [
            f"{group[0]} on row {group[1]} was not drawn yet" for group in groups if group not in planned
        ]


def audit_killed(run_dir: Path, plan: Plan) -> Audit:
    """Audit a folder after a kill: every checkpoint can be read completely, and the groups in the newest checkpoint and
    in the steps before it are exactly the groups that were drawn."""
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
    """Audit the folder of a run that has ended: every planned group was trained once, and no token was too old. If the
    run must equal an undisturbed run, it has the same metrics and weights."""
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
    """Read all parts of a checkpoint.

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
    """Return the groups that were trained in step `step` (from 1), from the trajectories that the run stored."""
    path = RunDir(run_dir).trajectories / f"train_step_{step:06d}.jsonl"
    found = ((t.group_id, t.task_id) for t in read_trajectories(path)) if path.exists() else ()
    return list(dict.fromkeys(found))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without metrics that depend on time."""
    rows = map(json.loads, RunDir(run_dir).metrics.read_text(encoding="utf-8").splitlines())
    return [{key: row[key] for key in row if not key.startswith(("time/", "perf/"))} for row in rows]


def weights(run_dir: Path) -> bytes:
    """Return the weights that the run has exported."""
    return (RunDir(run_dir).export / "model.safetensors").read_bytes()
