"""Advantages and log-probs per token, written back to the turns."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.trainer.data.samples import group_samples, note_advantages, note_logprobs
from mtrl.types import Group
from tests.trainer.helpers import make_group


@given(st.integers(0, 1000), st.booleans())
def test_results_are_written_to_every_trained_turn_also_across_breaks(seed, broken):
    group = make_group(seed, 50)
    if broken:
        for trajectory in group.trajectories:
            trajectory.turns[-1].break_reason = "template"
    group.trajectories[0].trainable = False
    given_ = [[float(10 * i + j) for j in range(len(t.turns))] for i, t in enumerate(group.trajectories)]
    samples = group_samples(group, given_)
    note_advantages([group], samples)
    note_logprobs([group], [(s, torch.tensor([-float(turn) for turn in s.turns if turn >= 0])) for s in samples])
    for i, trajectory in enumerate(group.trajectories):
        for j, turn in enumerate(trajectory.turns):
            if trajectory.trainable:
                assert turn.advantages == [given_[i][j]]
                assert turn.trainer_logprobs == [-float(j)] * len(turn.action_ids)
            else:
                assert turn.advantages == turn.trainer_logprobs == []


def test_advantages_per_token_are_written_per_token():
    group = make_group(1, 50, size=1, turns=1)
    (sample,) = group_samples(group, [[0.0]])
    values = [float(i) for i in range(sample.action_tokens)]
    numbers = iter(values)
    sample.advantages = [next(numbers) if mask else 0.0 for mask in sample.loss_mask]
    note_advantages([group], [sample])
    assert group.trajectories[0].turns[0].advantages == (values if len(values) > 1 else [0.0])


def test_only_the_given_trajectories_are_written_to():
    group = make_group(3, 50, size=3)
    samples = group_samples(group, [[1.0] * len(t.turns) for t in group.trajectories])
    selected = Group(group.group_id, group.row, [group.trajectories[1]])
    note_advantages([selected], samples)
    note_logprobs([selected], [(sample, torch.zeros(sample.action_tokens)) for sample in samples])
    for trajectory in group.trajectories:
        expected = [1.0] if trajectory is group.trajectories[1] else []
        assert all(
            turn.advantages == expected and bool(turn.trainer_logprobs) == bool(expected) for turn in trajectory.turns
        )
