"""The benchmark of overlapping runs: its output follows from the records of the runs, and tools take time."""

import json

import pytest

from tests.benchmark_runs import run_benchmark

pytestmark = pytest.mark.ci


def bench(folder, *words):
    return run_benchmark(folder, "asynchrony.py", *words, timeout=300)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_modes_are_compared_within_a_round(tmp_path):
    words = ["--tools", "50 to 500 ms", "--ways", "synchronous", "overlapped", "--json", "found.json", "--runs", "runs"]
    done = bench(tmp_path, "--quick", *words, "model.warm_start.demonstrations=8")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["sizes"] == {"rounds": 1, "warm_up": 1, "steps": 1}
    for tool, ways in result["tools"].items():
        plain, overlapped = ways["synchronous"], ways["overlapped"]
        assert (
            plain["ratios"] == {"synchronous": [1.0]}
            and plain["median"]["oldest"] == plain["median"]["side_by_side"] == 0
        )
        assert overlapped["median"]["oldest"] <= 1
        assert overlapped["ratio"]["synchronous"] == pytest.approx(
            overlapped["runs"][0]["steps_per_minute"] / plain["runs"][0]["steps_per_minute"]
        )
        for way in ways:
            folder = tmp_path / "runs" / f"{tool}-{way}-0".replace(" ", "_")
            (row,) = [row for row in read(folder / "metrics.jsonl") if row["step"] == 2]
            ends = {span["step"]: span["end"] for span in read(folder / "timeline.jsonl") if span["name"] == "sync"}
            (run,) = ways[way]["runs"]
            assert run["seconds"] == pytest.approx(ends[2] - ends[1])
            assert run["steps_per_minute"] == pytest.approx(60 / run["seconds"])
            assert run["trainer_waits"] == row["perf/idle_frac"]
            assert row["time/environment_per_turn"] >= 0.05
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 50 to 500 ms")]
    assert [line.split(" | ")[1] for line in rows] == ["synchronous", "overlapped"]


def test_sizes_that_measure_nothing_are_refused(tmp_path):
    done = bench(tmp_path, "--warm-up", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--warm-up must be at least 1")
