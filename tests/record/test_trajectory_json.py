"""The lines of trajectories are those of `json.dumps`, byte for byte."""

import json
import math
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtrl.record.trajectory_json import LONG, floats, trajectory_line
from mtrl.types import FinishReason, Trajectory, Turn, to_dict

bits = st.integers(0, 2**64 - 1).map(lambda number: struct.unpack("<d", struct.pack("<Q", number))[0])
small = st.floats(-1e-3, 1e-3)
single = st.floats(width=32)
EDGES = [0.0, -0.0, 1e-4, 9.999999999999999e-05, 1e16, 9999999999999998.0, 5e-324, 1e300, math.inf, -math.inf, math.nan]


@given(st.lists(bits | small | single | st.floats(), min_size=LONG, max_size=3 * LONG))
@example([sign * edge for edge in EDGES for sign in (1, -1)])
@example([10.0**power * sign for power in range(-30, 30) for sign in (1, -1)])
def test_floats_are_printed_as_python_prints_them(values):
    assert floats(values) == json.dumps(values)


@pytest.mark.parametrize("odd", [1, True, None, "0.5, 1", [0.5]])
def test_lists_of_other_values_are_printed_by_python(odd):
    for values in ([], [0.5], [odd] * 2 * LONG, [*[0.5] * LONG, odd]):
        assert floats(values) == json.dumps(values)


@given(st.text(max_size=20), st.lists(st.floats(), max_size=2 * LONG))
def test_a_line_equals_json_dumps(text, values):
    message = {"role": "assistant", "content": text, "tool_calls": [{text: values[:2]}]}
    turn = Turn(
        [1, 2], [3] * len(values), values, [(0, len(values))], FinishReason.STOP, text, message, [message], 0.5,
        {text: 1.0}, {"m": math.inf}, None, None, 1e-5, 2.0, values[:1], values,
    )  # fmt: skip
    data = to_dict(Trajectory(text, "g\u2028", 1, [turn, turn], metrics={text: 1e-7}, score=None, error=text))
    assert trajectory_line(data) == json.dumps(data, ensure_ascii=False)
