"""What the rules read of a run's configuration."""

import pytest
from made_up_runs import configured

from mtrl.diagnose.record import Record


def test_values_that_are_no_finite_numbers_are_left_out():
    row = {"step": 1, "a": 10**400, "b": float("nan"), "c": True, "d": "1", "e": 2}
    record = Record(configured(), rows=[row])
    assert record.metrics() == ["e", "step"] and record.series("e").values.tolist() == [2.0]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({}, 16 * 8),
        ({"a": {}, "b": {"weight": 3}}, 16 * 8),
        ({"a": {"algorithm": {"group_size": 2}}, "b": {"weight": 3}}, 4 * 2 + 12 * 8),
        ({"a": {"weight": [[0, 1], [9, 0]], "algorithm": {"group_size": 4}}, "b": {"weight": 0}}, 16 * 4),
    ],
)
def test_episodes_of_a_step_by_worked_numbers(sources, expected):
    config = configured(trainer__prompts_per_step=16, algorithm__group_size=8, environments=sources)
    assert Record(config).episodes == expected
