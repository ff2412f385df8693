"""Worked numbers for the statistics, and bounds on the effect of noise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.diagnose.stats import (
    Change,
    change_point,
    compare,
    halves,
    mean,
    noise,
    running_mean,
    slope,
    sparkline,
    wobble,
)


def test_mean_and_its_error():
    # residuals of 1, 3, 2, 4 around their line 1.3 + 0.8 i: -0.3, 0.9, -0.9, 0.3; 1.8 / 2 = 0.9; correlation below 0
    found = mean([1, 3, 2, 4])
    assert (found.value, found.count) == (2.5, 4)
    assert found.error == pytest.approx(math.sqrt(0.9) / 2)


def test_a_given_noise_is_used():
    assert mean([1, 2, 3, 4], 2.0).error == 1.0


def test_an_empty_window_has_no_mean():
    with pytest.raises(ValueError, match="no values"):
        mean([])


def test_correlated_residuals_widen_the_error():
    # residuals 1, 1, -1, -1, -1, -1, 1, 1 (mean and slope 0): r = (1-1+1+1+1-1+1)/8 = 3/8, √((11/8)/(5/8)) = √2.2
    values = [1, 1, -1, -1, -1, -1, 1, 1]
    assert wobble(values) == pytest.approx(math.sqrt(8 / 6 * 2.2))


def test_a_straight_line_has_no_noise_and_its_own_slope():
    assert wobble([0, 2, 4, 6]) == 0.0
    assert slope([0, 2, 4, 6]).value == 2.0
    assert slope([5]).error == math.inf


def test_two_values_give_no_estimate_of_the_noise():
    assert wobble([1, 2]) == math.inf and noise([1, 2]) == math.inf


def test_compare():
    change = compare([1, 1, 1, 1], [3, 3, 3, 3], 1.0)
    assert change == Change(1.0, 3.0, math.sqrt(0.5))
    assert change.z == pytest.approx(2 * math.sqrt(2))
    assert change.at_least(2.0) == pytest.approx(2 - math.sqrt(2))
    assert change.at_least(3.0) == 0.0
    assert change.at_most(2.0) == pytest.approx(2 + math.sqrt(2))


def test_without_noise_any_difference_is_certain():
    assert Change(0.0, -1.0, 0.0).z == -math.inf
    assert Change(1.0, 1.0, 0.0).z == 0.0


def test_halves_leave_out_the_middle():
    change = halves([0, 0, 9, 1, 1])
    assert (change.before, change.after) == (0.0, 1.0)


def test_change_point_is_the_first_value_of_the_new_level():
    assert change_point([1, 1, 1, 1, 0, 0, 0]) == 4
    assert change_point([1, 1, 1, 1, 1, 0, 0], 3) == 4  # three values are needed on each side
    assert change_point([1, 0, 1], 2) is None


def test_noise_excludes_the_trend_of_the_curve():
    curve = np.concatenate([np.zeros(40), np.ones(40)])
    rng = np.random.default_rng(0)
    assert noise(curve + 0.01 * rng.standard_normal(80)) < 0.05 < wobble(curve)


def test_noise_pools_parts_from_the_end():
    """Two parts of ten steps, each with a line of its own, agree with `wobble` of each."""
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal(10), 5 + 3 * rng.standard_normal(10)
    pooled = math.sqrt((wobble(first) ** 2 + wobble(second) ** 2) / 2)
    assert noise([*first, *second]) == pytest.approx(pooled)
    assert noise([99.0, *first, *second]) == pytest.approx(pooled)
    assert noise(np.arange(40) * 0.1) == 0.0


def test_running_mean():
    assert running_mean([1, 2, 3, 4], 2).tolist() == [1.5, 2.5, 3.5]


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1]) == "▄▄"
    assert sparkline([math.nan]) == ""
    assert len(sparkline(range(1000), 40)) == 40


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=60), st.floats(-1e3, 1e3))
def test_noise_does_not_depend_on_the_level_of_the_curve(values, shift):
    assert wobble(values) == pytest.approx(wobble([value + shift for value in values]), rel=1e-3, abs=1e-4)


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_errors_are_of_the_right_size(seed):
    """About 5 % of the means of 200 windows of white noise are more than two errors away."""
    rng = np.random.default_rng(seed)
    windows = rng.standard_normal((200, 25))
    far = sum(abs(mean(window).value) > 2 * mean(window).error for window in windows)
    assert far < 30
