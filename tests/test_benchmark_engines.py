"""The benchmark of the engines: its output follows from its rounds, and its servers end with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.benchmark_runs import run_benchmark
from tests.engines.real.installed import engine_python

ROOT = Path(__file__).parent.parent
SMALL = ["--groups", "1", "--tokens", "4"]


def start(*words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), *words]
    return forked.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def tree_of(pid):
    """Return the ids of all descendants of a process."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*found, *(pid for child in found for pid in tree_of(child))]


@pytest.mark.slow
def test_the_table_has_the_medians_of_the_rounds(tmp_path):
    words = [*SMALL, "--engines", "local", "--rounds", "2", "--json", "found.json", "debug=fast"]
    done = run_benchmark(tmp_path, "engines.py", *words, is_apart=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result, lines = json.loads((tmp_path / "found.json").read_text()), done.stdout.splitlines()
    local = result["engines"]["local"]
    assert local["x local"] == {} and all(len(rounds) == 2 for rounds in local["values"].values())
    assert min(local["values"]["memory, MiB"]) >= 0, "the engine may use memory that this process held before"
    assert all(min(rounds) > 0 for name, rounds in local["values"].items() if name != "memory, MiB")
    assert lines[-len(local["values"]) - 2] == "|  | local |"
    assert [line.split(" | ")[0] for line in lines[-len(local["values"]) :]] == [
        f"| {name}" for name in local["values"]
    ]


@pytest.mark.slow
@pytest.mark.rare
def test_engines_are_compared_within_a_round_and_end_with_it(tmp_path):
    engine_python("vllm")
    words = ["--engines", "local", "vllm", "--rounds", "1", "--json", str(tmp_path / "found.json"), "debug=fast"]
    process = start(*SMALL, *words)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-4000:]
    result = json.loads((tmp_path / "found.json").read_text())
    local, vllm = (result["engines"][name] for name in ("local", "vllm"))
    assert {name for name in vllm["values"] if name.endswith("/s")} == set(vllm["x local"])
    for name, (ratio,) in vllm["x local"].items():
        assert ratio == vllm["values"][name][0] / local["values"][name][0]

    process = start("--engines", "vllm", *SMALL, "debug=fast")
    while not (
        servers := [p for p in tree_of(process.pid) if b"vllm.serve" in Path(f"/proc/{p}/cmdline").read_bytes()]
    ):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130 and not any(Path(f"/proc/{pid}").exists() for pid in servers)


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--random", "100", "2"]])
def test_sizes_that_measure_nothing_are_refused(words):
    process = start(*words)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and words[0] in errors.splitlines()[-1]
