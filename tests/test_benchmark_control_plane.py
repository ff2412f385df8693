"""The benchmarks of the control plane and of many episodes run, and their numbers add up. Times are not tested."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.benchmark_runs import run_benchmark

ROOT = Path(__file__).parent.parent
SMALL = (
    "--prompts 2 --group-size 4 --turns 3 --tokens 50 --observation-characters 60 --prompt-tokens 20 --ranks 3 "
    "--vocabulary 400 --text-characters 20000 --micro-batch-tokens 2000"
)
FEW = "--episodes 12 --group-size 2 --turns 2 --words 3 --delay-ms 100 --steps 6 --step-prompts 2"


def run(folder, script, *words):
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return run_benchmark(folder, script, *words, PYTHONPATH=path)


def test_every_part_of_a_step_is_measured(tmp_path):
    done = run(tmp_path, "control_plane.py", *SMALL.split(), "--once")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert set(result["parts"]) == {
        "tokenise", "parse", "environments", "episodes", "(engine)", "rewards", "advantages", "samples",
        "batches, 1 rank", "batches, 3 ranks", "hand-out", "metrics", "notes", "trajectories",
    }  # fmt: skip
    assert all(cost["cpu_s"] > 0 for cost in result["parts"].values())
    counts = result["counts"]
    assert counts["trajectories"] == counts["samples"] == 8
    assert counts["turns"] == 8 * 3 and counts["sampled"] == 8 * 3 * 50
    assert counts["context"] > counts["sampled"] and counts["file_bytes"] > counts["context"]
    assert 3 * counts["sent_bytes_most"] >= counts["sent_bytes"] > 0


def test_shares_are_fractions_of_published_steps(tmp_path):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import control_plane
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    sizes, _ = control_plane.parse(["--prompts", "64"])
    cost, dear = {"wall_s": 2.0, "cpu_s": 1.0}, {"wall_s": 9.0, "cpu_s": 9.0}
    names = ["episodes", control_plane.ONE, "samples", "trajectories", control_plane.ENGINE]
    rounds = [{"parts": {name: each for name in names}} for each in (dear, cost)]
    best = control_plane.best_of(sizes, rounds)
    every, usual, after = best["totals"].values()
    assert every == {"wall_s": 6.0, "cpu_s": 3.0}  # without the part for one rank and the engine
    assert usual["cpu_s"] == pytest.approx(2.1) and after["cpu_s"] == pytest.approx(1.1)
    rows = {(row["step"], row["how"]): row for row in best["shares"]}
    published = rows["verl, the same, asynchronous", "as published"]
    assert list(published["shares"].values()) == pytest.approx([2 * 3 / 221.4, 2 * 2.1 / 221.4, 2 * 1.1 / 221.4])
    scaled = rows["NeMo-RL, the same per GPU, on 64", "for these tokens"]
    assert scaled["seconds"] == pytest.approx(4_096_000 / (64 * 1414))
    assert next(iter(scaled["shares"].values())) == pytest.approx(3 / scaled["seconds"])


def test_a_folder_without_mtrl_is_refused(tmp_path):
    done = run(tmp_path, "control_plane.py", "--against", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("holds no mtrl")


@pytest.mark.parametrize("kind", ["async step", "plain step", "typed tool"])
def test_all_episodes_are_open_at_once(tmp_path, kind):
    words = ["--here", "--only", "at-once", "--environments", kind]
    done = run(tmp_path, "episodes.py", *FEW.split(), *words)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["episodes"], found["open_at_once"], found["turns"]) == (12, 12, 24)
    assert found["lag_ms"]["p50"] <= found["lag_ms"]["p99"] <= found["lag_ms"]["max"]


def test_steps_are_read_and_fitted(tmp_path):
    done = run(tmp_path, "episodes.py", *FEW.split(), "--here", "--only", "steps", "--environments", "async step")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["steps"], found["fitted"], found["episodes_per_step"]) == (6, 4, 4)
    assert len(found["readings"]) == 6 and all(one["objects"] > 0 for one in found["readings"])


def test_a_line_is_fitted_by_least_squares():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import episodes
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert episodes.line([1.0, 3.0, 5.0, 7.0]) == {"slope": 2.0, "error": 0.0, "mean": 4.0}
    bent = episodes.line([0.0, 0.0, 3.0])
    assert bent["slope"] == pytest.approx(1.5) and bent["error"] == pytest.approx((1.5 / 2) ** 0.5)
