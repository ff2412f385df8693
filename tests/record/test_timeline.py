"""The timeline of a run."""

import json
import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.record.timeline import Timeline, rows


def spans(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_spans_follow_one_another_and_name_their_lane(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 0.0)
    with timeline.span("generate", 1) as generating:
        pass
    with timeline.span("update", 1):
        pass
    first, second = spans(tmp_path / "timeline.jsonl")
    assert (first["step"], first["name"], first["lane"]) == (1, "generate", "generator")
    assert second["lane"] == "trainer"
    assert 0 <= first["start"] <= first["end"] <= second["start"] <= second["end"]
    assert generating.seconds == pytest.approx(first["end"] - first["start"], abs=1e-5)


def test_a_failed_block_is_recorded(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 0.0)
    with pytest.raises(KeyError), timeline.span("update", 1):
        raise KeyError
    assert [span["name"] for span in spans(tmp_path / "timeline.jsonl")] == ["update"]


def test_a_resumed_run_continues_after_its_checkpoint_and_removes_repeated_steps(tmp_path):
    path = tmp_path / "timeline.jsonl"
    timeline = Timeline(path)
    timeline.start(0, 0.0)
    for step in (1, 2, 3):
        with timeline.span("generate", step):
            pass
    timeline.close()
    again = Timeline(path)
    again.start(2, 1000.0)
    with again.span("generate", 3):
        pass
    found = spans(path)
    assert [span["step"] for span in found] == [1, 2, 3]
    assert found[-1]["start"] >= 1000.0
    assert again.seconds >= 1000.0


def test_overlapping_spans_are_recorded_when_they_end(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 0.0)
    start = timeline.seconds
    with timeline.span("wait", 1), timeline.span("update", 1):
        pass
    timeline.record("rollout", 2, start, timeline.seconds)
    found = spans(tmp_path / "timeline.jsonl")
    assert [(span["step"], span["name"], span["lane"]) for span in found] == [
        (1, "update", "trainer"),
        (1, "wait", "trainer"),
        (2, "rollout", "generator"),
    ]
    assert found[2]["start"] <= found[1]["start"] <= found[0]["end"] <= found[1]["end"] <= found[2]["end"]
    assert timeline.spans(since=found[1]["end"]) == found[1:]


def test_spans_of_many_threads_are_whole_lines(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 0.0)

    def write(step):
        for _ in range(100):
            with timeline.span("update", step):
                pass

    threads = [threading.Thread(target=write, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert Counter(span["step"] for span in spans(tmp_path / "timeline.jsonl")) == dict.fromkeys(range(4), 100)


def test_on_begin_is_called_before_each_block(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    calls = []
    timeline.on_begin = lambda: calls.append(timeline.seconds)
    with timeline.span("update", 1) as updating:
        assert len(calls) == 1 and calls[0] <= updating.start
    assert len(calls) == 1


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_rows_separate_overlapping_stretches_with_the_fewest_rows(parts):
    stretches = sorted((float(start), float(start + length)) for start, length in parts)
    found = rows(stretches)
    for row in set(found):
        chosen = [stretch for stretch, own in zip(stretches, found, strict=True) if own == row]
        assert all(first[1] <= second[0] for first, second in pairwise(chosen))
    most = max((sum(s <= start < max(e, s + 0.5) for s, e in stretches) for start, _ in stretches), default=0)
    assert len(set(found)) <= most
