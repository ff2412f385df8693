"""Conversion of trajectories to training samples: turns merge into one sequence while each context extends the tokens
of an earlier turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mtrl.algorithms.batch import Ragged
from mtrl.algorithms.peers import Floats
from mtrl.types import Group, Sample, Trajectory


def group_samples(group: Group, advantages: Sequence[Sequence[float]]) -> list[Sample]:
    """Return the samples of all trainable trajectories; `advantages[g][t]` belongs to turn t of trajectory g."""
    return [
        sample
        for trajectory, turn_advantages in zip(group.trajectories, advantages, strict=True)
        if trajectory.trainable
        for sample in trajectory_samples(trajectory, turn_advantages)
    ]


def trajectory_samples(trajectory: Trajectory, advantages: Sequence[float]) -> list[Sample]:
    """Return one sample per unbroken sequence of turns (sequence extension; tinker-cookbook, `trajectory_to_data`).

    Every sampled token occurs exactly once with mask True; observations, and tokens that a break repeats, have mask
    False.

    Raises:
        ValueError: two turns extend the tokens of the same turn, or a turn extends one that is not before it.
    """
    samples: list[Sample] = []
    ends: dict[int, Sample] = {}
    """Samples by the index of the last turn that they contain so far."""
    for index, (turn, advantage) in enumerate(zip(trajectory.turns, advantages, strict=True)):
        if (before := turn.before(index)) is None:
            samples.append(Sample([], [], [], [], [], [], trajectory.group_id, trajectory.index))
            sample = samples[-1]
        elif before in ends:
            sample = ends.pop(before)
        else:
            raise ValueError(f"turn {index} extends turn {before}, at which no sample ends: a break is missing")
        ends[index] = sample
        observed, sampled = len(turn.observation_ids), len(turn.action_ids)
        sample.token_ids += turn.observation_ids + turn.action_ids
        sample.loss_mask += [False] * observed + [True] * sampled
        sample.logprobs += [0.0] * observed + turn.action_logprobs
        sample.advantages += [0.0] * observed + [advantage] * sampled
        sample.versions += [-1] * observed + turn.versions
        sample.turns += [-1] * observed + [index] * sampled
    return [sample for sample in samples if any(sample.loss_mask)]


@dataclass
class Credited:
    """The samples of a step's groups with their advantages, and with the targets of a critic."""

    samples: list[Sample]
    """Samples of all trainable trajectories, with their advantages."""
    advantages: list[Ragged]
    """Advantages of all trajectories, per group: one number per turn, the mean over its tokens."""
    old_values: list[Floats] = field(default_factory=list)
    """Per sample, the critic's value before each sampled token; with `turn_gae` the value of the token's turn."""
    targets: list[Floats] = field(default_factory=list)
    """Per sample, the targets of these values, which are lambda-returns."""
