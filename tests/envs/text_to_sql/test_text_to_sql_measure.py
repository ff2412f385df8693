"""Further measures of evaluations."""

import pytest

from envs.text_to_sql import FAMILY


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        (["<solution>select max(fee) from goods where hue = 'RED'</solution>"], (1.0, 1.0, 1.0)),
        (["<solution>select min(qty) from goods</solution>"], (1.0, 1.0, 1.0)),  # wrong, and of the right shape
        (["<solution>select fee from goods</solution>"], (1.0, 1.0, 0.0)),
        (["<solution>select fee, qty from goods limit 1</solution>"], (1.0, 1.0, 0.0)),
        (["<solution>select price from goods</solution>"], (1.0, 0.0, 0.0)),
        (["<sql>select fee from goods</sql>"], (0.0, 0.0, 0.0)),
        (["<solution>select 1</solution>", "hm"], (0.0, 0.0, 0.0)),
        ([], (0.0, 0.0, 0.0)),
    ],
)
def test_format_execution_and_shape(make_row, trajectory_of, responses, expected):
    row, trajectory = make_row(), trajectory_of(responses)
    found = FAMILY.measure(trajectory, row)
    assert tuple(found[name] for name in ("format", "executes", "shape")) == expected
    assert FAMILY.score(trajectory, row) <= min(expected)
