"""Makes samples with advantages from the rewarded groups of a step, and assigns results per token to turns again.

Turns merge into one sequence while each context extends the tokens of an earlier turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TypeVar

from torch import Tensor

from mtrl.algorithms.advantages import turn_advantages
from mtrl.algorithms.batch import Floats, Ragged
from mtrl.config.algorithm_schema import AlgorithmConfig
from mtrl.rewards.compose import RewardComposer
from mtrl.types import Group, Sample, Trajectory, Turn
from mtrl.utils.expert_ids import joined

T = TypeVar("T")


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


def credit_by_rewards(groups: Sequence[Group], config: AlgorithmConfig, composer: RewardComposer) -> Credited:
    """Compute advantages by an estimator without a critic."""
    advantages = advantages_of(groups, config, composer)
    pairs = zip(groups, advantages, strict=True)
    return Credited([sample for group, turns in pairs for sample in group_samples(group, turns)], advantages)


def advantages_of(groups: Sequence[Group], config: AlgorithmConfig, composer: RewardComposer) -> list[Ragged]:
    """Return the advantage of each turn, as `turn_advantages` does, for each of the `comparable_batches`."""
    batches = comparable_batches(groups, composer)
    found = [turn_advantages(batch, config, composer.of(batch[0]).weights) for batch in batches]
    return in_groups(groups, batches, found)


def comparable_batches(groups: Sequence[Group], composer: RewardComposer) -> list[list[Group]]:
    """Return batches of groups: one batch for each source of a mixture and each role of self-play. So neither groups
    nor estimators that normalise over the batch compare rewards of several compositions or roles."""
    batches: dict[tuple[int, str | None], list[Group]] = {}
    for part in (part for group in groups for part in group.by_role()):
        batches.setdefault((id(composer.of(part)), part.role), []).append(part)
    return [*batches.values()]


def in_groups(
    groups: Sequence[Group], batches: Sequence[Sequence[Group]], advantages: Sequence[Sequence[Ragged]]
) -> list[Ragged]:
    """Return the advantages of batches, each with one `Ragged` per group, in the order of the groups and their
    trajectories."""
    found: dict[int, list[float]] = {}
    """Advantages by the identity of the trajectory."""
    for batch, of_batch in zip(batches, advantages, strict=True):
        for part, turns in zip(batch, of_batch, strict=True):
            found |= zip(map(id, part.trajectories), turns, strict=True)
    return [[found[id(trajectory)] for trajectory in group.trajectories] for group in groups]


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
        ValueError: two turns extend the tokens of the same turn, a turn extends one that is not before it, or the ids
            of experts of a turn do not fit its tokens.
    """
    samples: list[Sample] = []
    experts: dict[int, list[tuple[str | None, int]]] = {}
    """Ids of experts and number of tokens of each turn, by the identity of its sample."""
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
        sample.images += trajectory.images_of(index)
        experts.setdefault(id(sample), []).append((turn.experts, observed + sampled))
    for sample in samples:
        sample.experts = joined(experts[id(sample)])
    return [sample for sample in samples if any(sample.loss_mask)]


def note_advantages(groups: Sequence[Group], samples: Iterable[Sample]) -> None:
    """Set `Turn.advantages` of every turn in `samples`: a single number if all of its tokens have the same
    advantage."""
    pairs = ((sample, sample) for sample in samples)
    for turn, values in _by_turn(groups, pairs, lambda sample: _sampled_values(sample, sample.advantages)):
        turn.advantages = values[:1] if len(set(values)) == 1 else values


def note_logprobs(groups: Sequence[Group], first_logprobs: Iterable[tuple[Sample, Tensor]]) -> None:
    """Set `Turn.trainer_logprobs` from samples with the trainer's log-probs, one number per sampled token."""
    for turn, values in _by_turn(groups, first_logprobs, Tensor.tolist):
        turn.trainer_logprobs = values


def _sampled_values(sample: Sample, values: Sequence[float]) -> list[float]:
    """Return the values of the sampled tokens."""
    return list(compress(values, sample.loss_mask))


def _by_turn(
    groups: Sequence[Group], found: Iterable[tuple[Sample, T]], read: Callable[[T], list[float]]
) -> Iterator[tuple[Turn, list[float]]]:
    """Yield each turn with its list of values. `read` converts the second element of a pair to one number per sampled
    token of the sample.

    Samples of other groups are skipped before `read`, since most steps save only a few trajectories.
    """
    turns = {(t.group_id, t.index): t.turns for group in groups for t in group.trajectories}
    for sample, what in found:
        if (mine := turns.get((sample.group_id, sample.trajectory))) is None:
            continue
        numbers, start = read(what), 0
        for index in (turn for turn in dict.fromkeys(sample.turns) if turn >= 0):
            end = start + len(mine[index].action_ids)  # the tokens of a turn are adjacent
            yield mine[index], numbers[start:end]
            start = end
