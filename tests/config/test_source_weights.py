"""Weights of sources: worked numbers of a schedule, and shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.config.source_weights import read_weight, shares_of


@pytest.mark.parametrize(
    ("rows", "weight"), [(0, 4.0), (10, 4.0), (15, 3.0), (20, 2.0), (21, 1.6), (25, 0.0), (26, 0.0), (10**9, 0.0)]
)
def test_a_schedule_is_linear_between_its_points_and_constant_outside(rows, weight):
    assert read_weight("a", [[10, 4], [20, 2.0], [25, 0]]).at(rows) == pytest.approx(weight)


def test_a_number_is_a_constant_weight():
    weight = read_weight("a", 3)
    assert [weight.at(rows) for rows in (0, 1, 10**9)] == [3.0] * 3 and weight.is_ever_positive
    assert not read_weight("a", 0).is_ever_positive and read_weight("a", [[0, 0], [5, 1]]).is_ever_positive


POINTS = st.lists(
    st.tuples(st.integers(0, 99), st.floats(0, 9)), min_size=1, max_size=4, unique_by=lambda pair: pair[0]
)


@given(st.lists(POINTS, min_size=1, max_size=4), st.integers(0, 120))
def test_shares_sum_to_one_and_are_in_the_ratio_of_the_weights(schedules, rows):
    weights = {str(number): read_weight("a", sorted(map(list, pairs))) for number, pairs in enumerate(schedules)}
    shares, found = shares_of(weights, rows), {name: weight.at(rows) for name, weight in weights.items()}
    assert sum(shares.values()) == pytest.approx(1)
    if total := sum(found.values()):
        assert shares == pytest.approx({name: weight / total for name, weight in found.items()})
    else:
        assert len(set(shares.values())) == 1
