"""Further measures of evaluations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.search import FAMILY
from tests.envs.episodes import trajectory_of

WORDS = st.sampled_from(["tin", "the", "tins", "a tin", "zinc", "<answer>", "</answer>", "<search>", " ", "!"])


@pytest.mark.parametrize(
    ("responses", "form", "contains"),
    [
        (["<answer>tin</answer>"], 1.0, 1.0),
        (["<answer>The Tin!</answer>"], 1.0, 1.0),
        (["<answer>it is tin, I think</answer>"], 1.0, 1.0),
        (["<answer>tins</answer>"], 1.0, 0.0),
        (["<answer>zinc</answer>"], 1.0, 0.0),
        (["<search>tin</search>"], 0.0, 0.0),
        (["<answer>tin</answer>", "tin"], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_format_and_containment(make_row, responses, form, contains):
    found = FAMILY.measure(trajectory_of(responses), make_row())
    assert found == {"format": form, "contains": contains}


@given(response=st.lists(WORDS, max_size=6).map("".join))
def test_a_success_has_both(response, make_row):
    row, trajectory = make_row(), trajectory_of([response])
    found = FAMILY.measure(trajectory, row)
    assert FAMILY.score(trajectory, row) <= found["contains"] <= found["format"]
