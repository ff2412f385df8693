"""A training run of a few seconds in a temporary folder, which verifies that all parts work together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mtrl.preflight.result import Result, failed, passed

COMMAND = ("debug=fast", "tracker.plots=false", "preflight.at_start=none")
LIMIT = 180.0
"""Time limit of the run, in seconds; an idle machine with two cores needs about 15."""
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for a rank. They are removed, because the smoke run is no rank."""


def smoke(seconds: float = LIMIT) -> Result:
    """Create the tiny policy, train it for two steps, and read the summary of the run."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mtrl-doctor-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "mtrl.main", *COMMAND, f"run_dir={run}"]
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCH}
        environment["MTRL_CACHE"] = str(Path(folder) / "cache")
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return failed(f"two steps of the tiny policy did not end within {seconds:g} seconds", _again())
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            return failed(f"two steps of the tiny policy failed with status {done.returncode}: {last}", _again())
        steps = json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"]
    return passed(f"{steps} steps of the tiny policy in {time.monotonic() - start:.0f} seconds, all in all")


def _again() -> str:
    return "see all that it says with: python -m mtrl.main debug=fast"
