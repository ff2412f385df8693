"""What the update made of each token, written back to the turns, for people to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TypeVar

from torch import Tensor

from mtrl.trainer.throughput import Work
from mtrl.types import Group, Sample, Turn

T = TypeVar("T")


@dataclass
class Learnt:
    """What came of one step's update."""

    metrics: dict[str, float] = field(default_factory=dict)
    looked_at: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """Samples with the trainer's log-probs [action tokens] before the first update."""
    works: list[Work] = field(default_factory=list)
    """What each rank computed."""


def note_advantages(groups: Sequence[Group], samples: Iterable[Sample]) -> None:
    """Set `Turn.advantages` of every turn that was credited: one number where all of its tokens have the same."""
    pairs = ((sample, sample) for sample in samples)
    for turn, values in _by_turn(groups, pairs, lambda sample: _said(sample, sample.advantages)):
        turn.advantages = values[:1] if len(set(values)) == 1 else values


def note_logprobs(groups: Sequence[Group], looked_at: Iterable[tuple[Sample, Tensor]]) -> None:
    """Set `Turn.trainer_logprobs` from the samples that the trainer looked at, with one number per sampled token."""
    for turn, values in _by_turn(groups, looked_at, Tensor.tolist):
        turn.trainer_logprobs = values


def _said(sample: Sample, values: Sequence[float]) -> list[float]:
    """Those of the sampled tokens."""
    return list(compress(values, sample.loss_mask))


def _by_turn(
    groups: Sequence[Group], found: Iterable[tuple[Sample, T]], read: Callable[[T], list[float]]
) -> Iterator[tuple[Turn, list[float]]]:
    """One list per turn from what was found of each sample, which `read` makes one number per sampled token of.

    Samples of other groups are passed over unread: most steps keep a few trajectories of many.
    """
    turns = {(t.group_id, t.index): t.turns for group in groups for t in group.trajectories}
    for sample, what in found:
        if (mine := turns.get((sample.group_id, sample.trajectory))) is None:
            continue
        numbers, start = read(what), 0
        for index in (turn for turn in dict.fromkeys(sample.turns) if turn >= 0):
            end = start + len(mine[index].action_ids)  # those of a turn lie side by side
            yield mine[index], numbers[start:end]
            start = end
