"""What the run was doing when."""

import json

import pytest

from mtrl.tracking.timeline import Timeline


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


def test_what_fails_is_on_it_too(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 0.0)
    with pytest.raises(KeyError), timeline.span("update", 1):
        raise KeyError
    assert [span["name"] for span in spans(tmp_path / "timeline.jsonl")] == ["update"]


def test_a_resumed_run_goes_on_where_it_was_saved_and_forgets_the_steps_it_makes_again(tmp_path):
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
