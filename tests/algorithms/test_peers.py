"""Peers: sets of adjacent values, compared with naive loops, and the equality of values up to rounding."""

import statistics
from itertools import groupby

import numpy as np
import pytest
from groups import reward
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.algorithms.batch import Peers

sets = st.lists(st.lists(reward, min_size=1, max_size=5), min_size=1, max_size=5)


def flat_peers(values, magnitudes=None):
    """Return the peers of nested lists, with ids that differ only between adjacent sets: 0, 1, 0, 1, …"""
    ids = np.array([i % 2 for i, members in enumerate(values) for _ in members], dtype=np.int64)
    return Peers(ids, magnitudes), np.array([v for members in values for v in members], dtype=np.float64)


def per_set(function, values):
    return [result for members in values for result in function(members)]


def others(members, i):
    return [*members[:i], *members[i + 1 :]]


@settings(deadline=None)
@given(values=sets)
def test_statistics_are_those_of_each_set(values):
    peers, array = flat_peers(values)
    assert peers.sum(array) == pytest.approx(per_set(lambda m: [sum(m)] * len(m), values))
    assert peers.mean(array) == pytest.approx(per_set(lambda m: [statistics.mean(m)] * len(m), values))
    stds = per_set(lambda m: [statistics.stdev(m) if len(m) > 1 else 0.0] * len(m), values)
    assert peers.std(array) == pytest.approx(stds, abs=1e-9)
    left_out = per_set(
        lambda m: [v - statistics.mean(others(m, i)) if len(m) > 1 else 0.0 for i, v in enumerate(m)], values
    )
    assert peers.leave_one_out(array) == pytest.approx(left_out, abs=1e-9)
    standardised = per_set(
        lambda m: [(v - statistics.mean(m)) / (statistics.stdev(m) + 0.5) if len(m) > 1 else 0.0 for v in m], values
    )
    assert peers.standardise(array, 0.5) == pytest.approx(standardised, abs=1e-9)


@settings(deadline=None)
@given(values=sets)
def test_sets_are_runs_of_equal_ids(values):
    peers, array = flat_peers(values)
    runs = [len(list(run)) for _, run in groupby(peers.ids.tolist())]
    assert peers.sizes.tolist() == runs == [len(members) for members in values]
    assert peers.starts.tolist() == [sum(runs[:i]) for i in range(len(runs))]
    assert len(peers.spread(peers.sizes)) == len(array)


def test_no_values():
    peers, array = flat_peers([])
    for result in (peers.sum(array), peers.mean(array), peers.centre(array), peers.std(array), peers.are_equal(array)):
        assert result.tolist() == []


@settings(deadline=None)
@given(value=st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300), n=st.integers(1, 9))
def test_equal_values_are_centred_to_exactly_0(value, n):
    peers, array = flat_peers([[value] * n])
    assert peers.centre(array).tolist() == peers.leave_one_out(array).tolist() == [0.0] * n


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_equality_is_relative_to_the_magnitude_of_the_values(scale):
    for members, equal in [([1.0, 1.0 + 1e-12], True), ([1.0, 1.0 + 1e-6], False), ([0.0, 1e-6], False)]:
        peers, array = flat_peers([[scale * v for v in members]])
        assert set(peers.are_equal(array).tolist()) == {equal}


def test_sums_that_cancel_are_equal_up_to_the_rounding_of_their_terms():
    """2.8e-17 and 0 count as different, unless it is known that they are sums of terms of about 0.3."""
    sums = [(0.1 + 0.2) - 0.3, 0.1 + (0.2 - 0.3), 0.0]
    assert len(set(sums)) == 3
    plain, array = flat_peers([sums])
    assert not plain.are_equal(array).any()
    known = Peers(plain.ids, np.array([0.6, 0.6, 0.0]))
    assert known.centre(array).tolist() == [0.0] * 3


def test_the_magnitude_of_one_set_does_not_affect_another():
    peers = Peers(np.array([0, 0, 1, 1]), np.array([1e9, 1e9, 1.0, 1.0]))
    assert peers.are_equal(np.array([0.0, 1e-3, 0.0, 1e-3])).tolist() == [True, True, False, False]


def test_a_small_difference_beside_large_rewards_does_not_count_as_rounding():
    """A small reward is added to large ones that cancel: 1e-3 of 2000 is far above the rounding of the sum."""
    peers = Peers(np.array([0, 0]), np.array([2000.0, 2000.0]))
    assert not peers.are_equal(np.array([1e-3, 0.0])).any()
