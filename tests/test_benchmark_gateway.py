"""The benchmark of the gateway runs and counts lost and mixed calls. Times are not tested."""

import json
import math

from tests.benchmark_runs import run_benchmark


def test_a_small_load_loses_no_call(tmp_path):
    words = ["--trajectories", "6", "--calls", "3", "--delay", "0.01", "--json", "load.json"]
    done = run_benchmark(tmp_path, "gateway.py", *words)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "load.json").read_text())
    assert found.keys() == {"paced", "burst"}
    for modes in found.values():
        for mode in ("gateway", "floor"):
            (result,) = modes[mode]
            assert (result["calls"], result["lost"], result["mixed"]) == (18, 0, 0)
            assert all(math.isfinite(value) for value in result["added_ms"].values())
        assert modes["gateway"][0]["whole_trajectories"] == 6
    assert "paced, gateway" in done.stdout
