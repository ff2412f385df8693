"""A trace of a step has all threads and the spans of the timeline."""

import asyncio
import gzip
import json
import time

import pytest
import torch

from mtrl.record.timeline import Timeline
from mtrl.record.trace import Cost, costs, step_trace, table


def op(name, ts, dur, tid=1, kind="cpu_op"):
    return {"ph": "X", "cat": kind, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": dur}


def events_of(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


@pytest.fixture
def timeline(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.start(0, 100.0)
    yield timeline
    timeline.close()


def multiply(size, times):
    matrix = torch.ones(size, size)
    for _ in range(times):
        torch.mm(matrix, matrix)


def test_an_update_concurrent_with_rollouts_is_traced(tmp_path, timeline):
    """The update runs in its own thread and the sampling in the event loop; one span is recorded without a block."""

    def update():
        with timeline.span("update", 3):
            multiply(40, 30)

    async def sample():
        start = timeline.seconds
        for _ in range(20):
            torch.add(torch.ones(5), 1)
            await asyncio.sleep(0)
        timeline.record("rollout", 4, start, timeline.seconds)

    async def step():
        await asyncio.gather(asyncio.to_thread(update), sample())
        with timeline.span("sync", 3):
            pass

    path = tmp_path / "trace_step_3.json.gz"
    with step_trace(path, timeline):
        asyncio.run(step())
    events = events_of(path)
    spans = {event["name"]: event for event in events if event["pid"] == "timeline" and event["ph"] == "X"}
    assert {name: span["tid"] for name, span in spans.items()} == {
        "update": "trainer",
        "sync": "trainer",
        "rollout": "generator",
    }
    for name, kind, count in (("update", "aten::mm", 30), ("rollout", "aten::add", 20)):
        inside = [event for event in events if event["name"] == kind]
        span = spans[name]
        assert len(inside) == count
        # Two clocks: they agree within a millisecond or so.
        assert all(abs(e["ts"] - span["ts"] - span["dur"] / 2) <= span["dur"] / 2 + 5e3 for e in inside)
    threads = [{event["tid"] for event in events if event["name"] == kind} for kind in ("aten::mm", "aten::add")]
    assert len(threads[0]) == len(threads[1]) == 1 and threads[0] != threads[1]
    table = (tmp_path / "trace_step_3.txt").read_text()
    assert "aten::mm" in table and "rollout" in table
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "timeline.jsonl",
        "trace_step_3.json.gz",
        "trace_step_3.txt",
    ]


def test_only_the_start_of_a_long_span_is_recorded(tmp_path, timeline):
    """Operations outside of the windows are not recorded, and the next span has its own window."""
    path = tmp_path / "trace.json.gz"
    with step_trace(path, timeline, seconds=1.0):  # long enough for what is first, on a busy machine too
        with timeline.span("generate", 1):
            multiply(8, 3)
            recorder = timeline.on_begin.__self__
            end = time.monotonic() + 60
            while recorder.recording and time.monotonic() < end:
                time.sleep(0.01)
            multiply(16, 5)  # unseen
            torch.neg(torch.ones(3))
        recorder.seconds = 60.0
        with timeline.span("update", 1):
            torch.sub(torch.ones(3), 1)
    names = [event["name"] for event in events_of(path)]
    assert names.count("aten::mm") == 3 and "aten::neg" not in names and names.count("aten::sub") == 1
    stamps = {event["name"]: event["ts"] for event in events_of(path) if event.get("cat") in ("cpu_op", "timeline")}
    assert stamps["generate"] < stamps["aten::mm"] < stamps["update"] < stamps["aten::sub"]


def test_a_failed_step_leaves_no_trace_and_an_unchanged_timeline(tmp_path, timeline):
    before = timeline.on_begin
    with pytest.raises(KeyError), step_trace(tmp_path / "trace.json.gz", timeline), timeline.span("update", 1):
        raise KeyError
    assert timeline.on_begin is before
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.jsonl"]
    with step_trace(tmp_path / "trace.json.gz", timeline):  # and the next one works
        multiply(4, 2)
    assert [event["name"] for event in events_of(tmp_path / "trace.json.gz")].count("aten::mm") == 2


def test_the_own_time_of_an_operation_excludes_its_calls():
    events = [
        op("outer", 0, 10),
        op("inner", 2, 3),
        op("inner", 6, 2),
        op("innermost", 6, 1),
        op("outer", 20, 5),
        op("inner", 2, 4, tid=2),
        op("gemm", 3, 9, tid=3, kind="kernel"),
        {"ph": "M", "name": "process_name", "pid": 7},
        op("Optimizer.step", 0, 99, kind="user_annotation"),
    ]
    assert costs(events) == {
        ("cpu_op", "outer"): Cost(2, 10.0, 15.0),
        ("cpu_op", "inner"): Cost(3, 8.0, 9.0),
        ("cpu_op", "innermost"): Cost(1, 1.0, 1.0),
        ("kernel", "gemm"): Cost(1, 9.0, 9.0),
    }
    lines = table([{"name": "update", "lane": "trainer", "start": 1.0, "end": 2.5}], events).splitlines()
    assert lines[1].split() == ["update", "trainer", "1.000", "2.500"]
    assert [line.split()[2:] for line in lines[4:6]] == [["0.01", "2", "outer"], ["0.01", "1", "gemm", "(kernel)"]]
