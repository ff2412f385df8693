"""Sequence extension: turns to samples."""

import json
import random

import pytest
from helpers import make_group, make_turn, split_by_turn
from hypothesis import given
from hypothesis import strategies as st

from mtrl.trainer.data.samples import group_samples, trajectory_samples
from mtrl.types import FinishReason, Trajectory, Turn, to_json, trajectory_from_dict


def turn(seen, sampled, break_reason=None, parent=None):
    spans = [(4, len(sampled))]
    return Turn(
        seen, sampled, [-0.5] * len(sampled), spans, FinishReason.STOP, "", {}, break_reason=break_reason, parent=parent
    )


def test_turns_that_extend_each_other_are_one_sample():
    trajectory = Trajectory("t", "g", 2, [turn([1, 2], [3, 4]), turn([5], [6])])
    (sample,) = trajectory_samples(trajectory, [0.5, -1.0])
    assert sample.token_ids == [1, 2, 3, 4, 5, 6]
    assert sample.loss_mask == [False, False, True, True, False, True]
    assert sample.logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert sample.advantages == [0.0, 0.0, 0.5, 0.5, 0.0, -1.0]
    assert sample.versions == [-1, -1, 4, 4, -1, 4]
    assert sample.turns == [-1, -1, 0, 0, -1, 1]
    assert (sample.group_id, sample.trajectory) == ("g", 2)


def test_a_break_starts_a_new_sample_with_the_whole_context():
    trajectory = Trajectory("t", "g", 0, [turn([1, 2], [3]), turn([9, 8, 7], [6], "edited")])
    first, second = trajectory_samples(trajectory, [1.0, 2.0])
    assert (first.token_ids, second.token_ids) == ([1, 2, 3], [9, 8, 7, 6])
    assert second.turns == [-1, -1, -1, 1] and second.advantages[-1] == 2.0


def test_a_turn_extends_its_parent():
    """A program and its helper call the model in turn, and the program's second branch has its whole context."""
    turns = [
        turn([1, 2], [3]),
        turn([7], [8], "fresh"),
        turn([4], [5], parent=0),
        turn([9], [10, 11], parent=1),
        turn([1, 2, 3, 6], [7], "branch"),
        turn([12], [13], parent=3),
    ]
    trajectory = Trajectory("t", "g", 0, turns)
    samples = trajectory_samples(trajectory, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert [s.token_ids for s in samples] == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [1, 2, 3, 6, 7]]
    assert [s.turns for s in samples] == [[-1, -1, 0, -1, 2], [-1, 1, -1, 3, 3, -1, 5], [-1, -1, -1, -1, 4]]
    assert samples[1].advantages == [0.0, 1.0, 0.0, 3.0, 3.0, 0.0, 5.0]
    assert trajectory.contexts == [2, 1, 4, 3, 4, 6] and trajectory.context_tokens == 7
    assert trajectory_from_dict(json.loads(to_json(trajectory))) == trajectory


@pytest.mark.parametrize("parent", [-1, 2, 5])
def test_a_turn_that_extends_a_later_one_is_an_error(parent):
    trajectory = Trajectory("t", "g", 0, [turn([1], [2]), turn([3], [4]), turn([5], [6], parent=parent)])
    with pytest.raises(ValueError, match="a break is missing"):
        trajectory_samples(trajectory, [1.0] * 3)
    with pytest.raises(ValueError, match="not before it"):
        trajectory_from_dict(json.loads(to_json(trajectory)))


def test_two_turns_that_extend_one_turn_are_an_error():
    trajectory = Trajectory("t", "g", 0, [turn([1], [2]), turn([3], [4]), turn([5], [6], parent=0)])
    with pytest.raises(ValueError, match="turn 2 extends turn 0"):
        trajectory_samples(trajectory, [1.0] * 3)


def test_turns_without_sampled_tokens_give_no_sample():
    assert trajectory_samples(Trajectory("t", "g", 0, [turn([1], [])]), [1.0]) == []


def test_untrainable_trajectories_are_left_out():
    group = make_group(0, 50)
    group.trajectories[1].trainable = False
    samples = group_samples(group, [[1.0] * len(t.turns) for t in group.trajectories])
    assert {s.trajectory for s in samples} == {0, 2, 3}


@given(st.integers(0, 10_000))
def test_every_sampled_token_is_trained_exactly_once(seed):
    rng = random.Random(seed)
    turns = [make_turn(rng, 90, rng.choice([None, None, "template"]) if i else None) for i in range(rng.randint(1, 6))]
    trajectory = Trajectory("t", "g", 0, turns)
    advantages = [rng.random() for _ in turns]
    for form in (trajectory, split_by_turn(trajectory)):
        samples = trajectory_samples(form, advantages)
        trained = [(i, lp) for s in samples for i, lp, m in zip(s.token_ids, s.logprobs, s.loss_mask, strict=True) if m]
        assert trained == [pair for t in turns for pair in zip(t.action_ids, t.action_logprobs, strict=True)]
