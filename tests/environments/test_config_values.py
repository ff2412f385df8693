"""Counts and numbers of `environment.config` are checked, with the key and the value in the error."""

import math

import pytest

from mtrl.environments.config_values import check_count, check_positive
from mtrl.errors import UserError


@pytest.mark.parametrize(
    ("low", "high", "valid", "bounds"), [(1, None, (1, 10**9), "of at least 1"), (0, 3, (0, 3), "from 0 to 3")]
)
def test_a_count_is_a_whole_number_in_its_range(low, high, valid, bounds):
    for value in valid:
        check_count("n", value, low, high)
    for value in (low - 1, 2.0, True, "2", None, math.nan, *(() if high is None else (high + 1,))):
        with pytest.raises(UserError) as caught:
            check_count("n", value, low, high)
        assert str(caught.value) == f"environment.config.n={value!r} must be a whole number {bounds}"


def test_a_positive_number_is_finite():
    for value in (1, 0.5, 1e300):
        check_positive("seconds", value)
    for value in (0, -1, True, "2", None, math.nan, math.inf):
        with pytest.raises(UserError) as caught:
            check_positive("seconds", value)
        assert str(caught.value) == f"environment.config.seconds={value!r} must be a number above 0"
