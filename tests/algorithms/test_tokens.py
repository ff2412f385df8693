"""`TokenBatch`: sums over the trajectory of each token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.algorithms.losses import TokenBatch


def batch(trajectory, rollout=None):
    zeros = torch.zeros(len(trajectory)) if trajectory is not None else torch.zeros(3)
    index = None if trajectory is None else torch.tensor(trajectory)
    return TokenBatch(zeros, zeros - 1.0, zeros, rollout, index)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5)), min_size=1, max_size=30))
def test_sums_and_means_are_those_of_the_tokens_of_one_trajectory(pairs):
    """Tokens are interleaved, and some trajectory indices have no token."""
    trajectory, values = np.array([t for t, _ in pairs]), np.array([v for _, v in pairs])
    tokens = batch(trajectory.tolist())
    expected = [values[trajectory == t] for t in trajectory]
    given_values = torch.tensor(values)
    np.testing.assert_allclose(tokens.trajectory_sum(given_values), [v.sum() for v in expected], atol=1e-12)
    np.testing.assert_allclose(tokens.trajectory_mean(given_values), [v.mean() for v in expected], atol=1e-12)


def test_without_an_index_all_tokens_belong_to_one_trajectory():
    tokens = batch(None)
    assert tokens.trajectory_sum(torch.tensor([1.0, 2.0, 6.0])).tolist() == [9.0] * 3
    assert tokens.trajectory_mean(torch.tensor([1.0, 2.0, 6.0])).tolist() == [3.0] * 3


def test_no_tokens():
    empty = torch.zeros(0)
    for trajectory in (None, torch.zeros(0, dtype=torch.long)):
        tokens = TokenBatch(empty, empty, empty, None, trajectory)
        assert tokens.trajectory_sum(empty).shape == tokens.trajectory_mean(empty).shape == (0,)


def test_a_trajectory_sum_has_a_gradient_for_every_token():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    batch([0, 1, 0]).trajectory_sum(values)[0].backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0]


def test_the_behaviour_is_the_rollout_or_else_the_old_policy():
    assert batch([0, 0]).behaviour.tolist() == [-1.0, -1.0]
    assert batch([0, 0], torch.tensor([-3.0, -4.0])).behaviour.tolist() == [-3.0, -4.0]
