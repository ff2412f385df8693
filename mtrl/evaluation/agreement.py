"""Reward against scorer on one trajectory: do they agree on whether it is a success?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mtrl.config.schema import EvaluationConfig
from mtrl.types import Trajectory

EPSILON = 1e-9
"""A sum of rewards that should be 1 can miss it by a rounding."""


class Verdict(StrEnum):
    """What reward and scorer say of one trajectory, side by side."""

    AGREE = "agree"
    LENIENT = "lenient"
    """The reward says solved, the scorer does not: what a policy learns to exploit."""
    STRICT = "strict"
    """The scorer says solved, the reward does not: success that is not paid."""


def succeeded(trajectory: Trajectory, threshold: float = 1.0) -> bool:
    """The scorer calls it a success; a trajectory without a score is none."""
    return (trajectory.score or 0.0) >= threshold - EPSILON


def claimed(trajectory: Trajectory, threshold: float = 1.0) -> bool:
    """The reward calls it a success."""
    return trajectory.reward >= threshold - EPSILON


@dataclass(frozen=True)
class Thresholds:
    """From where on a score, and a reward, mean success."""

    success: float = 1.0
    claim: float = 1.0

    @classmethod
    def of(cls, config: EvaluationConfig) -> Thresholds:
        """`evaluation.success_threshold` and `evaluation.claim_threshold`."""
        claim = config.success_threshold if config.claim_threshold is None else config.claim_threshold
        return cls(config.success_threshold, claim)

    def verdict(self, trajectory: Trajectory) -> Verdict:
        """Whether reward and scorer agree. A trajectory that was not scored agrees: nobody has contradicted it."""
        if trajectory.score is None:
            return Verdict.AGREE
        success, claim = succeeded(trajectory, self.success), claimed(trajectory, self.claim)
        if success == claim:
            return Verdict.AGREE
        return Verdict.LENIENT if claim else Verdict.STRICT
