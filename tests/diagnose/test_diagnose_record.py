"""What the rules read of a run's configuration."""

import pytest
from made_up_runs import configured

from mtrl.diagnose.record import Record


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
