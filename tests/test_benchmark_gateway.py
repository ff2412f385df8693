"""The benchmark of the gateway runs and counts lost and mixed calls. Times are not tested."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_small_load_loses_no_call(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["--trajectories", "6", "--calls", "3", "--delay", "0.01", "--json", "load.json"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gateway.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
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
