"""The benchmark of sequence extension: the tokens add up, and the gradients are the same."""

import json

import pytest

from tests.benchmark_runs import run_benchmark

SMALL = (
    "--hidden-size 16 --intermediate-size 16 --layers 1 --rollouts 2 --prompt-tokens 5 --tokens 3 "
    "--observation-tokens 2 --micro-batch-tokens 40 --repeats 1 --turns 1 4"
)


def bench(folder, *words):
    return run_benchmark(folder, "extension.py", *words)


@pytest.mark.slow
def test_tokens_add_up_and_gradients_agree(tmp_path):
    done = bench(tmp_path, *SMALL.split(), "--json", "found.json", "--plot", "found.svg")
    assert done.returncode == 0, done.stderr[-4000:]
    one, four = json.loads((tmp_path / "found.json").read_text())["turns"]
    assert one["per turn"]["tokens"] == one["merged"]["tokens"] == 2 * (5 + 3)
    assert four["merged"] | {"samples": 2, "tokens": 2 * (5 + 4 * 3 + 3 * 2)} == four["merged"]
    assert four["per turn"] | {"samples": 8, "tokens": 2 * (8 + 13 + 18 + 23)} == four["per turn"]
    assert four["tokens_ratio"] == pytest.approx(124 / 46) and 0 < four["gradient_difference"] < 1e-4
    lines = done.stdout.splitlines()
    assert lines[5].startswith("| 1 | 16 | 16 | 1.0 |") and lines[6].startswith("| 4 | 124 | 46 | 2.7 |")
    assert (tmp_path / "found.svg").read_text().startswith("<?xml")


def test_sizes_without_rollouts_are_refused(tmp_path):
    done = bench(tmp_path, "--turns", "0", "2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--turns must be at least 1")
