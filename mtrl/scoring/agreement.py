"""Agreement of reward and scorer on the success of one trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mtrl.config.schema import EvaluationConfig
from mtrl.types import EPSILON, Group, Trajectory


class TrajectoryAgreement(StrEnum):
    """Agreement of reward and scorer on one trajectory."""

    AGREE = "agree"
    LENIENT = "lenient"
    """The reward calls the trajectory solved and the scorer does not. A policy learns to exploit this."""
    STRICT = "strict"
    """The scorer calls the trajectory solved and the reward does not. Such success is not rewarded."""


def succeeded(trajectory: Trajectory, threshold: float = 1.0) -> bool:
    """Whether the scorer calls the trajectory a success. A trajectory without a score is not a success."""
    return (trajectory.score or 0.0) >= threshold - EPSILON


def claimed(trajectory: Trajectory, threshold: float = 1.0) -> bool:
    """Whether the reward calls the trajectory a success."""
    return trajectory.reward >= threshold - EPSILON


@dataclass(frozen=True)
class Thresholds:
    """Smallest score, and smallest reward, that mean success."""

    success: float = 1.0
    claim: float = 1.0

    @classmethod
    def of(cls, config: EvaluationConfig) -> Thresholds:
        """Return the thresholds `evaluation.success_threshold` and `evaluation.claim_threshold`."""
        claim = config.success_threshold if config.claim_threshold is None else config.claim_threshold
        return cls(config.success_threshold, claim)

    def verdict(self, trajectory: Trajectory) -> TrajectoryAgreement:
        """Return whether reward and scorer agree. A trajectory without a score counts as agreement."""
        if trajectory.score is None:
            return TrajectoryAgreement.AGREE
        success, claim = succeeded(trajectory, self.success), claimed(trajectory, self.claim)
        if success == claim:
            return TrajectoryAgreement.AGREE
        return TrajectoryAgreement.LENIENT if claim else TrajectoryAgreement.STRICT


def disagreements(groups: Iterable[Group], thresholds: Thresholds, limit: int) -> list[Group]:
    """Return the first `limit` trajectories on which reward and scorer disagree, each as a group of its own.
    Trajectories with a lenient reward come first, since the policy is trained to repeat them."""
    verdicts = [(thresholds.verdict(t), group, t) for group in groups for t in group.trajectories]
    found = [
        (group, t)
        for wanted in (TrajectoryAgreement.LENIENT, TrajectoryAgreement.STRICT)
        for verdict, group, t in verdicts
        if verdict == wanted
    ]
    return [Group(group.group_id, group.row, [t]) for group, t in found[:limit]]
