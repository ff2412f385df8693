"""Further measures of evaluations."""

import pytest

from envs.gsm8k import FAMILY
from tests.envs.episodes import trajectory_of


@pytest.mark.parametrize(
    ("responses", "form"),
    [
        (["#### 7"], 1.0),
        (["#### 72"], 1.0),
        (["72"], 0.0),
        (["#### 72", "hm"], 0.0),
        (["hm", "#### 1"], 1.0),
        ([], 0.0),
    ],
)
def test_format_measures_the_last_message(row, responses, form):
    assert FAMILY.measure(trajectory_of(responses), row) == {"format": form}


def test_a_success_has_the_format(row):
    trajectory = trajectory_of(["#### 72"])
    assert FAMILY.score(trajectory, row) == FAMILY.measure(trajectory, row)["format"] == 1.0
