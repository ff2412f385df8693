"""The input of an estimator: padding, returns-to-go, whitening."""

import math
import statistics

import numpy as np
import pytest
from groups import flat, group, groups, make_group, reward
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.algorithms.batch import CHUNK, CreditBatch, discounted_sums, fill, whiten
from mtrl.types import Group


def test_turns_are_padded_on_the_right():
    first = make_group([[1.0, 2.0], [3.0]], tokens=[[4, 5], [6]])
    batch = CreditBatch.of([first, make_group([[7.0, 8.0, 9.0]])], {"environment": 1.0})
    assert batch.rewards.tolist() == [[1, 2, 0], [3, 0, 0], [7, 8, 9]]
    assert batch.mask.tolist() == [[True, True, False], [True, False, False], [True, True, True]]
    assert batch.tokens.tolist() == [[4, 5, 0], [6, 0, 0], [1, 1, 1]]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.trajectories[:2] == first.trajectories
    assert batch.component_weights == {"environment": 1.0}
    assert batch.lengths.tolist() == [9, 6, 3]
    assert batch.outcomes.tolist() == [3.0, 3.0, 24.0]
    assert batch.magnitudes.tolist() == [3.0, 3.0, 24.0]
    assert batch.broadcast(np.array([1.0, 2.0, 3.0])).tolist() == [[1, 1, 0], [2, 0, 0], [3, 3, 3]]


@settings(deadline=None)
@given(batch=groups)
def test_ragged_removes_the_padding(batch):
    made = CreditBatch.of([make_group(g) for g in batch])
    assert made.ragged(made.rewards) == batch


@settings(deadline=None)
@given(rewards=group)
def test_outcomes_and_magnitudes(rewards):
    batch = CreditBatch.of([make_group(rewards)])
    assert batch.outcomes.tolist() == [math.fsum(turns) for turns in rewards]
    assert batch.magnitudes == pytest.approx([sum(map(abs, turns)) for turns in rewards])


def test_the_order_of_rewards_does_not_change_the_outcome():
    parts = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.2, 0.1, 0.3]]
    assert len({sum(turns) for turns in parts}) > 1, "the example must be one where rounding differs"
    assert len(set(CreditBatch.of([make_group(parts)]).outcomes.tolist())) == 1


def test_an_empty_batch():
    for empty in ([], [Group("empty", {}, [])]):
        batch = CreditBatch.of(empty)
        assert batch.rewards.shape == batch.mask.shape == batch.tokens.shape == (0, 0)
        assert batch.outcomes.tolist() == batch.magnitudes.tolist() == []
        assert batch.ragged(batch.rewards) == []


def test_fill_is_row_by_row():
    mask = np.array([[True, False, True], [False, True, False]])
    assert fill(mask, [1.0, 2.0, 3.0]).tolist() == [[1, 0, 2], [0, 3, 0]]
    assert fill(mask, [1, 2, 3], np.int64).dtype == np.int64


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(reward, min_size=1, max_size=9), min_size=1, max_size=4),
    repeats=st.sampled_from([1, 8, 20]),
    discount=st.sampled_from([1.0, 0.95, 0.5, 0.0]),
)
def test_discounted_sums_against_the_recursion(rows, repeats, discount):
    """Rows have up to 180 columns, which are three chunks."""
    rows = [row * repeats for row in rows]
    padded = np.zeros((len(rows), max(map(len, rows))))
    expected = np.zeros_like(padded)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        later = 0.0
        for t in reversed(range(len(row))):
            later = expected[i, t] = row[t] + discount * later
    assert discounted_sums(padded, discount) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("columns", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_discounted_sums_at_the_edges_of_chunks(columns):
    assert discounted_sums(np.ones((2, columns)), 1.0).tolist() == [list(range(columns, 0, -1))] * 2


# ---- whitening


def test_whiten_worked():
    """The values are 1, 0, 0, 1, of turns with 2, 3, 1 and 4 tokens."""
    values = whiten(np.array([[1.0], [0.0], [0.0], [1.0]]), np.array([[2], [3], [1], [4]]))
    assert values.ravel() == pytest.approx([0.774597, -1.161895, -1.161895, 0.774597], abs=1e-6)


@settings(deadline=None)
@given(data=st.data(), rewards=group)
def test_whiten_against_its_tokens_one_by_one(data, rewards):
    tokens = [[data.draw(st.integers(0, 3)) for _ in turns] for turns in rewards]
    batch = CreditBatch.of([make_group(rewards, tokens)])
    every = [r for r, n in zip(flat(rewards), flat(tokens), strict=True) for _ in range(n)]
    values = whiten(batch.rewards, batch.tokens)
    assert (values[batch.tokens == 0] == 0.0).all()
    if len(set(every)) < 2:
        assert not values.any()
        return
    mean, std = statistics.mean(every), (statistics.variance(every) + 1e-8) ** 0.5
    assert values[batch.tokens > 0] == pytest.approx((batch.rewards[batch.tokens > 0] - mean) / std, abs=1e-9)


def test_whitening_equal_values_gives_exactly_0():
    tokens = np.array([[1, 2, 3]])
    assert whiten(np.array([[0.1, 0.1, 0.1]]), tokens).tolist() == [[0.0] * 3]
    cancelling = np.array([[0.1 + 0.2 - 0.3, 0.1 + (0.2 - 0.3), 0.0]])
    assert whiten(cancelling, tokens).any(), "alone they are as different as numbers can be"
    assert whiten(cancelling, tokens, magnitude=0.6).tolist() == [[0.0] * 3]
    assert whiten(np.zeros((0, 0)), np.zeros((0, 0), dtype=np.int64)).shape == (0, 0)
