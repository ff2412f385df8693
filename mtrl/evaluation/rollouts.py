"""Source and episodes of one model in an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtrl.types import FAILED, Group, Trajectory


@dataclass(frozen=True)
class Source:
    """Source of a model."""

    kind: str
    """Kind of the source: base (the policy before training) | export (the final folder of a run) | checkpoint |
    folder | hub | endpoint"""
    label: str
    """Short label that is unique within an evaluation and valid in a file name."""
    text: str
    """Text of the source in the configuration."""
    path: str | None = None
    """Folder of the weights, or Hub name; None for an endpoint."""
    run: Path | None = None
    """Folder of the run that made the weights, if a run did."""
    url: str | None = None
    """URL of an endpoint, up to and including `/v1`."""
    model: str | None = None
    """Name of the model at the endpoint."""
    step: int = 0
    """Training step of the weights, which is their policy version; 0 if it is not known."""


@dataclass
class ModelRollouts:
    """All episodes of one model. Every model of an evaluation runs the same rows in the same order."""

    label: str
    """Label of its source."""
    source: Source
    groups: dict[str, list[Group]]
    """Groups by kind: `greedy` has one trajectory per row; `sampled`, if requested, has `evaluation.samples_per_row`
    per row. Groups are in the order of the rows, and `Group.row["id"]` pairs them between models. Every trajectory has
    its score, and the reward of the run's reward function.

    Failed episodes (`mtrl.types.FAILED`: the environment broke, or an endpoint did not answer) are included with score
    None. They are no evidence about the model, so rates leave them out, and their number is reported.
    """
    usage: dict[str, float] = field(default_factory=dict)
    """Requests to an endpoint and their cost (`mtrl.engines.endpoints.budget.Spending.metrics`), failed and abandoned
    episodes included. Empty for a model that ran locally."""

    def failures(self) -> list[Trajectory]:
        """Return the failed episodes of all kinds."""
        groups = [group for some in self.groups.values() for group in some]
        return [t for group in groups for t in group.trajectories if t.stop_reason in FAILED]
