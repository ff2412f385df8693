"""pass@k: worked numbers, brute force over subsets, and size."""

import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.scoring.pass_at_k import pass_at_k, pass_at_k_by_prompt


def test_worked():
    """reference/algorithms.md 4.3."""
    expected = [0.25, 0.464286, 0.642857, 0.785714, 0.892857, 0.964286, 1.0, 1.0]
    assert [pass_at_k(8, 2, k) for k in range(1, 9)] == pytest.approx(expected, abs=1e-6)


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_against_all_subsets(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    value = pass_at_k(len(outcomes), sum(outcomes), k)
    assert value == pytest.approx(fmean(map(any, itertools.combinations(outcomes, k))), abs=1e-12)


def test_it_is_unbiased_where_the_plug_in_form_is_not():
    n, k, p = 6, 3, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(q * pass_at_k(n, c, k) for c, q in enumerate(chances)) == pytest.approx(truth, abs=1e-12)
    assert sum(q * (1 - (1 - c / n) ** k) for c, q in enumerate(chances)) < truth - 0.05


def test_large_counts_neither_overflow_nor_lose_the_small_chance():
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4, rel=1e-12)
    all_miss = math.prod((1000 - i) / (2000 - i) for i in range(30))
    assert 1 - pass_at_k(2000, 30, 1000) == pytest.approx(all_miss, rel=1e-6)


def test_ends():
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 5, 1) == 1.0
    assert pass_at_k(5, 2, 4) == 1.0  # every subset of four holds a success


def test_by_prompt_thresholds_the_score():
    scores = [[1.0, 0.99, 0.0, 0.0], [0.5, 0.5], [1.0, 1.0, 1.0]]
    assert pass_at_k_by_prompt(scores, 1) == pytest.approx([0.25, 0.0, 1.0])
    assert pass_at_k_by_prompt(scores, 2) == pytest.approx([0.5, 0.0, 1.0])
    assert pass_at_k_by_prompt(scores, 1, success_threshold=0.5) == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_out_of_range(k):
    for call in (
        lambda: pass_at_k(3, 1, k),
        lambda: pass_at_k_by_prompt([[0.0] * 3], k),
    ):
        with pytest.raises(UserError, match=f"pass_k_values: pass@{k} .* is 3"):
            call()


@pytest.mark.parametrize("c", [-1, 4])
def test_impossible_successes(c):
    with pytest.raises(ValueError, match="successes among 3"):
        pass_at_k(3, c, 1)
