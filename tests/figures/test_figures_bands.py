"""Curves of several seeds: alignment, spread, and axes."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.errors import UserError
from mtrl.figures.axis import Axis, cost, places
from mtrl.figures.bands import band, keys_below, seed_band, window
from mtrl.figures.groups import SeedGroup
from tests.figures.made import MadeUpRun


def run(*rows, path="run"):
    return MadeUpRun(path, rows=rows)


def of(values, key="a"):
    """Return a run with values of `key` at steps 0, 1, …"""
    return run(*({"step": step, key: value} for step, value in enumerate(values)))


def test_mean_lowest_and_highest_seed():
    found = seed_band(SeedGroup("g", (of([1.0, 2.0]), of([3.0, 6.0]), of([2.0, 1.0]))), "a")
    assert found.steps == [0, 1]
    assert found.mean == [2.0, 3.0] and found.low == [1.0, 1.0] and found.high == [3.0, 6.0]
    assert found.seeds == [3, 3]


def test_a_partial_seed_counts_as_far_as_it_goes():
    found = seed_band(SeedGroup("g", (of([1.0, 1.0, 1.0, 1.0]), of([3.0, 3.0]))), "a")
    assert found.mean == [2.0, 2.0, 1.0, 1.0] and found.seeds == [2, 2, 1, 1]
    assert found.stretches() == [(0, 1, True), (1, 3, False)]


def test_a_gap_is_bridged_and_an_end_is_not_drawn_on():
    found = seed_band(SeedGroup("g", (of([1.0, math.nan, 2.0]), of([3.0, 3.0, None]))), "a")
    assert found.mean == [2.0, 2.25, 2.0] and found.seeds == [2, 2, 1]


def test_evaluations_at_other_steps_are_compared_where_both_lie():
    found = band([{0: 0.0, 20: 1.0, 40: 1.0}, {10: 0.5, 30: 0.5}])
    assert found.steps == [0, 10, 20, 30, 40] and found.mean == [0.0, 0.5, 0.75, 0.75, 1.0]
    assert found.seeds == [1, 2, 2, 2, 1] and found.stretches() == [(0, 1, False), (1, 3, True), (3, 4, False)]


def test_an_unmeasured_metric_is_empty():
    found = seed_band(SeedGroup("g", (of([1.0]),)), "b")
    assert not found and found.most == 0 and found.stretches() == []


def test_one_row_is_one_point():
    found = seed_band(SeedGroup("g", (of([1.0]),)), "a", smooth=True)
    assert found.mean == [1.0] and found.stretches() == [(0, 0, True)]


def test_seeds_are_smoothed_one_by_one():
    rising, flat = of([float(i) for i in range(40)]), of([0.0] * 40)
    found = seed_band(SeedGroup("g", (rising, flat)), "a", smooth=True)
    assert window(SeedGroup("g", (rising, flat)), "a") == 5
    assert found.high[10] == 10.0 and found.high[0] == 1.0 and found.low == [0.0] * 40


@settings(deadline=None, max_examples=60)
@given(st.lists(st.dictionaries(st.integers(0, 20), st.floats(-1e6, 1e6), max_size=15), min_size=1, max_size=5))
def test_bands_hold_their_mean_and_stretches_cover_every_step(seeds):
    found = band(seeds)
    assert found.steps == sorted(set().union(*seeds))
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert low - 1e-9 <= mean <= high + 1e-9
    pieces = found.stretches()
    if len(found.steps) > 1:
        assert pieces[0][0] == 0 and pieces[-1][1] == len(found.steps) - 1
        assert all(left[1] == right[0] and left[2] != right[2] for left, right in pairwise(pieces))


def test_keys_below_a_prefix_are_those_of_any_seed():
    group = SeedGroup("g", (run({"step": 1, "x/b": 1}), run({"step": 1, "x/a": 1, "y/c": 1})))
    assert keys_below(group, "x/") == ["x/a", "x/b"]


COSTS = {"perf/tokens_per_second": 100.0, "time/step": 36.0, "rollout/tokens/trajectory_mean": 50.0}


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis.STEPS, {0: 0.0, 1: 1.0, 2: 2.0}),
        (Axis.TOKENS, {0: 0.0, 1: 3600.0, 2: 7200.0}),
        (Axis.TRAJECTORIES, {0: 0.0, 1: 72.0, 2: 144.0}),
        (Axis.HOURS, {0: 0.0, 1: 0.01, 2: 0.02}),
    ],
)
def test_the_cost_of_steps_by_axis(axis, expected):
    assert cost(run({"step": 0}, {"step": 1, **COSTS}, {"step": 2, **COSTS}), axis) == pytest.approx(expected)


def test_an_axis_that_was_not_measured_is_one_sentence():
    with pytest.raises(UserError, match="--x hours needs time/step of every step, and step 2 of run has none"):
        cost(run({"step": 1, **COSTS}, {"step": 2}), Axis.HOURS)


def test_seeds_are_drawn_at_their_mean_cost():
    cheap, dear = run({"step": 1, **COSTS}), run({"step": 1, **COSTS, "time/step": 108.0}, {"step": 2, **COSTS})
    assert places(SeedGroup("g", (cheap, dear)), Axis.HOURS).of([1, 2]) == pytest.approx([0.02, 0.04])
