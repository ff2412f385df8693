"""What the update made of each token, written back to the turns, for people to look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mtrl.types import Group, Sample, Turn


@dataclass
class Learnt:
    """What came of one step's update."""

    metrics: dict[str, float] = field(default_factory=dict)
    looked_at: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """Samples with the trainer's log-probs [action tokens] before the first update."""


def note_advantages(groups: Sequence[Group], samples: Iterable[Sample]) -> None:
    """Set `Turn.advantages` of every turn that was credited: one number where all of its tokens have the same."""
    for turn, values in _by_turn(groups, ((sample, _said(sample, sample.advantages)) for sample in samples)):
        turn.advantages = values[:1] if len(set(values)) == 1 else values


def note_logprobs(groups: Sequence[Group], looked_at: Iterable[tuple[Sample, Tensor]]) -> None:
    """Set `Turn.trainer_logprobs` from the samples that the trainer looked at, with one number per sampled token."""
    for turn, values in _by_turn(groups, ((sample, numbers.tolist()) for sample, numbers in looked_at)):
        turn.trainer_logprobs = values


def _said(sample: Sample, values: Sequence[float]) -> list[float]:
    """Those of the sampled tokens."""
    return [value for value, said in zip(values, sample.loss_mask, strict=True) if said]


def _by_turn(
    groups: Sequence[Group], values: Iterable[tuple[Sample, Sequence[float]]]
) -> Iterable[tuple[Turn, list[float]]]:
    """One list per turn from one value per sampled token of each sample."""
    turns = {(t.group_id, t.index): t.turns for group in groups for t in group.trajectories}
    for sample, numbers in values:
        found: dict[int, list[float]] = {}
        for turn, number in zip(_said(sample, sample.turns), numbers, strict=True):
            found.setdefault(int(turn), []).append(number)
        for index, of_turn in found.items():
            yield turns[sample.group_id, sample.trajectory][index], of_turn
