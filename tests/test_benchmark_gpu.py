"""The benchmark of a GPU runs on a CPU with tiny sizes. Rates are not tested."""

import json

from tests.benchmark_runs import run_benchmark


def test_engines_and_updates_are_measured(tmp_path):
    done = run_benchmark(tmp_path, "gpu.py", "--quick", "--json", "gpu.json")
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((tmp_path / "gpu.json").read_text())
    assert list(figures["sampling"]) == ["generate", "local, graphs", "local, eager"]
    assert list(figures["updates"]) == ["default", "no recomputation"], "nothing is compiled on a CPU"
    assert min(figures["sampling"].values()) > 0
    assert all(found["tokens_per_second"] > 0 for found in figures["updates"].values())
    lines = done.stdout.splitlines()
    assert lines[0].startswith("CPU") and [line for line in lines if line.startswith("generate ")]
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]
