"""The benchmark of shared prefixes compares both layouts. Times are not tested."""

import re

from tests.benchmark_runs import run_benchmark


def test_both_layouts_compute_the_same_logprobs(tmp_path):
    small = ["--groups", "2", "--group-size", "2", "--system", "80", "--rounds", "1", "--dtype", "float32"]
    done = run_benchmark(tmp_path, "shared_prefixes.py", *small)
    assert done.returncode == 0, done.stderr
    computed = {name: int(count) for name, count in re.findall(r"^(packed|shared) +(\d+) tokens", done.stdout, re.M)}
    tokens = int(re.search(r"(\d+) tokens, float32", done.stdout)[1])
    assert computed["packed"] == tokens and computed["shared"] < tokens - 2 * 80
    assert float(done.stdout.rpartition(": ")[2]) < 1e-4
