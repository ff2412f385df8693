"""The benchmark of rollout workers samples the same episodes in every way. Times are not tested."""

import json

import pytest

from tests.benchmark_runs import run_benchmark

pytestmark = pytest.mark.ci


@pytest.mark.slow
def test_a_worker_returns_the_token_ids_of_one_process(tmp_path):
    sizes = "--groups 2 --group-size 2 --turns 2 --words 5 --step-ms 0.1 --rounds 1 --idle-seconds 0.1 --workers 1"
    words = [*sizes.split(), "--json", "workers.json"]
    done = run_benchmark(tmp_path, "rollout_workers.py", *words, RAY_ADDRESS="local")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "workers.json").read_text())
    assert found["is_sound"] and found["ways"].keys() == {"one process", "1 worker"}
    assert found["memory_mib"]["worker"] > 0
