"""The groups that a figure compares, and the horizontal axis of their curves: steps, or the cumulative cost of the
steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from mtrl.errors import UserError
from mtrl.figures.groups import SeedGroup
from mtrl.record.records import number_of
from mtrl.record.run import Run


class Axis(StrEnum):
    STEPS = "steps"
    TRAJECTORIES = "trajectories"
    TOKENS = "tokens"
    HOURS = "hours"


NAMES = {
    Axis.STEPS: "training step",
    Axis.TRAJECTORIES: "trajectories for training",
    Axis.TOKENS: "tokens for training",
    Axis.HOURS: "hours of training",
}
NEEDS = {
    Axis.TRAJECTORIES: ("perf/tokens_per_second", "time/step", "rollout/tokens/trajectory_mean"),
    Axis.TOKENS: ("perf/tokens_per_second", "time/step"),
    Axis.HOURS: ("time/step",),
}
"""Metrics from which an axis is computed."""


@dataclass(frozen=True)
class Study:
    """Groups to be compared, and the axis of their curves: the input of every figure."""

    groups: Sequence[SeedGroup]
    axis: Axis = Axis.STEPS

    def places(self, group: SeedGroup) -> Places:
        return places(group, self.axis)

    @property
    def most_seeds(self) -> int:
        return max(group.seeds for group in self.groups)


@dataclass(frozen=True)
class Places:
    """Positions of the steps of a group on an axis."""

    axis: Axis
    by_step: dict[int, float]

    @property
    def name(self) -> str:
        return NAMES[self.axis]

    def of(self, steps: list[int]) -> list[float]:
        return [self.by_step[step] for step in steps]


def places(group: SeedGroup, axis: Axis) -> Places:
    """Return the positions of the steps of a group. Seeds are compared step by step, so the position of a step is the
    mean of its costs over seeds."""
    costs = [cost(run, axis) for run in group]
    steps = sorted(set().union(*costs))
    return Places(axis, {step: fmean(c[step] for c in costs if step in c) for step in steps})


def cost(run: Run, axis: Axis) -> dict[int, float]:
    """Return step -> cumulative cost of all steps up to it; step 0, before training, is 0.

    Raises:
        UserError: A step lacks a metric that the axis needs.
    """
    if axis is Axis.STEPS:
        return {row["step"]: float(row["step"]) for row in run.rows}
    total, found = 0.0, {}
    for row in run.rows:
        if row["step"]:
            missing = [key for key in NEEDS[axis] if number_of(row.get(key)) is None]
            if missing:
                raise UserError(
                    f"--x {axis} needs {missing[0]} of every step, and step {row['step']} of {run.path} has none; "
                    "draw over --x steps"
                )
            total += _share(row, axis)
        found[row["step"]] = total
    return found


def _share(row: dict[str, float], axis: Axis) -> float:
    """Return the cost of one step. `perf/tokens_per_second` is the rate of all tokens sampled in `time/step`."""
    if axis is Axis.HOURS:
        return row["time/step"] / 3600
    tokens = row["perf/tokens_per_second"] * row["time/step"]
    if axis is Axis.TOKENS:
        return tokens
    mean = row["rollout/tokens/trajectory_mean"]
    return tokens / mean if mean else 0.0
