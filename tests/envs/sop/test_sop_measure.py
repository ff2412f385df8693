"""Measures of single fields of the answer, all of which the score requires."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.sop import FAMILY
from envs.sop.data import final_output
from mtrl.types import FinishReason, Trajectory, Turn
from tests.envs.episodes import trajectory_of


@pytest.fixture(scope="module")
def row(by_domain):
    return by_domain["customer_service"][0]


def measured(responses, row):
    return FAMILY.measure(trajectory_of(responses), row)


def test_each_field_has_its_own_measure(row):
    truth = row["ground_truth"]
    assert measured([final_output(truth)], row) == {"format": 1.0, **{f"field/{name}": 1.0 for name in truth}}
    for name in truth:
        for wrong in ({**truth, name: "x"}, {key: value for key, value in truth.items() if key != name}):
            found = measured([final_output(wrong)], row)
            assert found["format"] == 1.0
            assert found == {"format": 1.0, **{f"field/{key}": float(key != name) for key in truth}}


def test_invalid_answers_measure_zero(row):
    truth = row["ground_truth"]
    nothing = {"format": 0.0, **{f"field/{name}": 0.0 for name in truth}}
    right = final_output(truth)
    assert measured([], row) == measured([right, "hm"], row) == measured([right * 2], row) == nothing
    message = {"role": "assistant", "content": right, "tool_calls": [{"function": {"name": "x", "arguments": {}}}]}
    calling = Trajectory("row", "group", 0, [Turn([], [], [], [], FinishReason.STOP, right, message)])
    assert FAMILY.measure(calling, row) == nothing
    name, value = next(iter(truth.items()))
    twice = f'<final_output>{{"{name}": "{value}", "{name}": "{value}"}}</final_output>'
    assert measured([twice], row)[f"field/{name}"] == 0.0
    assert measured([final_output({**truth, "more": "x"})], row)[f"field/{name}"] == 1.0


@given(data=st.data())
def test_the_score_is_one_for_all_fields_and_no_other(data, row):
    truth = row["ground_truth"]
    names = data.draw(st.lists(st.sampled_from(sorted(truth)), unique=True))
    fields_given = {name: truth[name] if name not in names else "wrong" for name in truth}
    found = measured([final_output(fields_given)], row)
    fields = [value for name, value in found.items() if name.startswith("field/")]
    assert len(fields) == len(truth) and sum(fields) == len(truth) - len(names)
    assert FAMILY.score(trajectory_of([final_output(fields_given)]), row) == float(min(fields) == 1.0)
