"""Advantages and trainer log-probs of each token, written back to the turns for inspection."""

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
class UpdateResult:
    """Result of one step's update."""

    metrics: dict[str, float] = field(default_factory=dict)
    first_logprobs: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """Samples with the trainer's log-probs [action tokens] before the first update."""
    works: list[Work] = field(default_factory=list)
    """Computation of each rank."""


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
