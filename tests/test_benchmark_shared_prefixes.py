"""The benchmark of shared prefixes compares both layouts. Times are not tested."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_both_layouts_compute_the_same_logprobs():
    small = ["--groups", "2", "--group-size", "2", "--system", "80", "--rounds", "1", "--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "shared_prefixes.py", *small],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    computed = {name: int(count) for name, count in re.findall(r"^(packed|shared) +(\d+) tokens", done.stdout, re.M)}
    tokens = int(re.search(r"(\d+) tokens, float32", done.stdout)[1])
    assert computed["packed"] == tokens and computed["shared"] < tokens - 2 * 80
    assert float(done.stdout.rpartition(": ")[2]) < 1e-4
