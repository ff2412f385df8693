"""What programs may return."""

import numpy as np
import pytest

from mtrl.agents.runner import ProgramResult, as_outcome


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (1, ProgramResult(1.0)),
        (True, ProgramResult(1.0)),
        (0.25, ProgramResult(0.25)),
        (np.float32(0.5), ProgramResult(0.5)),
        ([0, 1.5], ProgramResult([0.0, 1.5])),
        (np.array([0.5, 1.0]), ProgramResult([0.5, 1.0])),
        ({"reward": 2}, ProgramResult(2.0)),
        ({"rewards": [1, 2]}, ProgramResult([1.0, 2.0])),
        ({"reward": None, "rewards": [1, 2]}, ProgramResult([1.0, 2.0])),
        ({"reward": 1, "metrics": {"tests": np.int64(3)}}, ProgramResult(1.0, {"tests": 3.0})),
        ({"metrics": {"a": 1}}, ProgramResult(None, {"a": 1.0})),
        ({"status": "error", "error": "no disk"}, ProgramResult(None, {}, "no disk")),
        ({"status": "failed"}, ProgramResult(None, {}, "the program reported that it failed")),
        ({"status": "accepted"}, ProgramResult()),
        (ProgramResult(3.0), ProgramResult(3.0)),
    ],
)
def test_valid_outcomes(value, expected):
    assert as_outcome(value, "play") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1.0", "play returned '1.0'; it must return None, a number, a list of numbers or a dict"),
        (object, "it must return None"),
        (float("nan"), "play returned the reward nan; it must be a finite number"),
        ([1.0, float("inf")], "it must be a finite number"),
        (-1e300, "play returned the reward -1e+300; it must be a finite number below 1e+12"),
        ([1.0, None], "it must be a finite number"),
        ({"reward": "much"}, "it must return None"),
        ({"reward": 1, "metrics": [1]}, "play returned the metrics [1]; they must be numbers by name"),
        ({"reward": 1, "metrics": {"a": "b"}}, "play returned metrics['a'] = 'b'; it must be a finite number"),
    ],
)
def test_invalid_outcomes_are_refused(value, message):
    with pytest.raises(TypeError) as error:
        as_outcome(value, "play")
    assert message in str(error.value)
