"""Further measures of evaluations."""

import pytest

from envs.triviaqa import FAMILY


@pytest.mark.parametrize(
    ("responses", "form", "contains"),
    [
        (["<reasoning>r</reasoning><answer>Paris</answer>"], 1.0, 1.0),
        (["<answer>in Paris, France</answer>"], 1.0, 1.0),
        (["<answer>Rome</answer>"], 1.0, 0.0),
        (["Paris"], 0.0, 0.0),
        (["<tool>Paris</tool>"], 0.0, 0.0),
        (["<answer>Paris</answer>", "Paris"], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_format_and_containment(make_row, make_trajectory, responses, form, contains):
    row, trajectory = make_row(["paris", "City of Light"]), make_trajectory(responses)
    assert FAMILY.measure(trajectory, row) == {"format": form, "contains": contains}
    assert FAMILY.score(trajectory, row) <= contains
