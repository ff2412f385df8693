"""Shares of time, on worked timelines."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.figures.spans import IDLE, TimelineSpan, lanes, middle_steps, overlap, read_spans, shares, windows


def span(step, name, start, end, lane=None):
    return TimelineSpan(
        step, name, lane or ("generator" if name in ("generate", "evaluate") else "trainer"), start, end
    )


ONE_AFTER_THE_OTHER = [
    span(1, "generate", 0, 4),
    span(1, "update", 4, 9),
    span(1, "sync", 9, 10),
    span(2, "generate", 10, 12),
    span(2, "update", 12, 14),
]
SIDE_BY_SIDE = [
    span(1, "generate", 0, 4),
    span(2, "generate", 4, 8),
    span(1, "update", 4, 7),
    span(2, "update", 8, 11),
]


def test_one_after_the_other():
    first, second = windows(ONE_AFTER_THE_OTHER)
    assert (first.step, first.start, first.end) == (1, 0, 10) and (second.start, second.end) == (10, 14)
    assert first.seconds["generator"] == {"generate": 4, IDLE: 6}
    assert first.seconds["trainer"] == {IDLE: 4, "update": 5, "sync": 1}
    assert overlap([first, second]) == 0
    assert shares([first, second], "generator") == pytest.approx({"generate": 6 / 14, IDLE: 8 / 14})


def test_side_by_side():
    found = windows(SIDE_BY_SIDE)
    assert [(w.step, w.start, w.end) for w in found] == [(1, 0, 4), (2, 4, 11)]
    assert shares(found, "trainer") == pytest.approx({"update": 6 / 11, IDLE: 5 / 11})
    assert overlap(found) == pytest.approx(3 / 11)


def test_waiting_is_not_counted_as_activity():
    """The trainer waits for half of the time in which the generator works."""
    found = windows([span(1, "generate", 0, 8), span(1, "wait", 0, 4), span(1, "update", 4, 8)])
    assert shares(found, "trainer") == pytest.approx({"wait": 0.5, "update": 0.5})
    assert overlap(found) == pytest.approx(0.5)


def test_an_inner_span_takes_the_time_of_the_outer():
    (window,) = windows([span(1, "update", 0, 10), span(1, "save", 4, 6)])
    assert window.seconds["trainer"] == {"update": 8, "save": 2}


def test_a_run_of_one_moment_or_of_none_has_no_time():
    assert windows([]) == [] and windows([span(1, "sync", 3, 3)]) == []
    assert shares([], "trainer") == {} and overlap([]) == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(0, 2), st.integers(0, 50), st.integers(0, 9)),
        max_size=25,
    )
)
def test_windows_partition_the_run_and_every_lane_fills_them(parts):
    spans = sorted(
        (
            TimelineSpan(step, name, f"lane{lane}", float(start), float(start + length))
            for step, name, lane, start, length in parts
        ),
        key=lambda s: s.start,
    )
    found = windows(spans)
    for window in found:
        for lane in lanes(spans):
            assert sum(window.seconds[lane].values()) == pytest.approx(window.end - window.start)
        assert 0 <= window.both <= window.end - window.start
    assert all(left.end == right.start for left, right in pairwise(found))
    if found:
        assert found[0].start == min(s.start for s in spans) and found[-1].end == max(s.end for s in spans)


def test_lanes_have_an_order():
    spans = [span(1, "x", 0, 1, lane) for lane in ("other", "trainer", "generator", "another")]
    assert lanes(spans) == ["generator", "trainer", "another", "other"]


def test_the_middle_of_a_run_without_evaluations():
    spans = [span(step, "generate", step, step + 1) for step in range(1, 10)] + [span(0, "evaluate", 0, 1)]
    assert middle_steps(spans) == [4, 5, 6]
    assert middle_steps(spans[:2]) == [1, 2] and middle_steps([]) == []


def test_spans_that_end_before_they_start_are_left_out():
    raw = {"step": 1, "name": "update", "lane": "trainer", "start": 2.0, "end": 3.0}
    assert read_spans([{**raw, "end": 1.0}, raw]) == [span(1, "update", 2.0, 3.0)]
