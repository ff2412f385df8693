"""What one model did in an evaluation: where it came from, and the episodes that it played."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtrl.types import FAILED, Group, Trajectory


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    kind: str
    """base: the policy before training | export: the final folder of a run | checkpoint | folder | hub | endpoint"""
    label: str
    """Short, unique within an evaluation, and fit for a file name."""
    text: str
    """As it was written in the configuration."""
    path: str | None = None
    """The folder of weights, or the Hub name; None for an endpoint."""
    run: Path | None = None
    """The run that made the weights, if one did."""
    url: str | None = None
    """Of an endpoint, up to and with `/v1`."""
    model: str | None = None
    """Of an endpoint: the name that the server knows it by."""
    step: int = 0
    """Training step of the weights, which is their policy version; 0 where none is known."""


@dataclass
class ModelRollouts:
    """All episodes of one model. Every model of an evaluation plays the same rows, in the same order."""

    label: str
    """That of its source."""
    source: Source
    groups: dict[str, list[Group]]
    """By kind: `greedy`, one trajectory per row; `sampled`, where asked for, `evaluation.samples_per_row` per row.
    Groups are in the order of the rows, and `Group.row["id"]` pairs them between models. Every trajectory has its score
    and its reward as the run pays it.

    Episodes that failed (`mtrl.types.FAILED`: the environment broke, or an endpoint did not answer) are in
    here with score None; they say nothing about the model, so rates are those of the others, and their number is told.
    """
    usage: dict[str, float] = field(default_factory=dict)
    """What an endpoint was asked for and cost (`mtrl.generator.engines.purse.Spent.metrics`), failed and abandoned
    episodes included. Empty for a model that ran here."""

    def failures(self) -> list[Trajectory]:
        """The episodes that failed, of all kinds."""
        groups = [group for some in self.groups.values() for group in some]
        return [t for group in groups for t in group.trajectories if t.stop_reason in FAILED]
