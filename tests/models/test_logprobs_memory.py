"""Memory of log-probs, as measured by benchmarks/logprobs.py in separate processes."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parent.parent.parent
TOKENS, VOCABULARY = 1024, 2**14
CHUNKS = (2**19, 2**21)
MIB = 2**20


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The output of the benchmark, and its rows by the number of logits in memory at once."""
    folder = tmp_path_factory.mktemp("bench")
    words = f"--tokens {TOKENS} --vocabulary {VOCABULARY} --chunks {CHUNKS[0]} {CHUNKS[1]} --hidden-size 32 --repeats 1"
    command = [sys.executable, str(ROOT / "benchmarks" / "logprobs.py"), *words.split(), "--json", "rows.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forked.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, {row["chunk"]: row for row in json.loads((folder / "rows.json").read_text())}


@pytest.mark.slow
def test_chunks_bound_the_memory(bench):
    """Chunks need two float32 arrays of one chunk; the naive form needs five arrays of all logits."""
    rows = bench[1]
    assert set(rows) == {*CHUNKS, TOKENS * VOCABULARY}
    logits = 4 * TOKENS * VOCABULARY / MIB
    naive = rows[TOKENS * VOCABULARY]["peak_mib"]
    small, large = (rows[chunk]["peak_mib"] for chunk in CHUNKS)
    assert naive > 4 * logits
    assert large < naive / 4
    # The memory grows by two arrays of a chunk: its logits and one more array of their size.
    assert large - small < 2.5 * 4 * (CHUNKS[1] - CHUNKS[0]) / MIB
    assert small < logits / 2  # the body and the gradients included


@pytest.mark.slow
def test_the_table_has_a_line_for_each_case(bench):
    lines = [line for line in bench[0].splitlines() if line.startswith("| 1024")]
    assert [line.split(" | ")[1:3] for line in lines] == [["naive", "all"], ["chunked", "32"], ["chunked", "128"]]
    naive, *chunked = bench[1][TOKENS * VOCABULARY], *(bench[1][chunk] for chunk in CHUNKS)
    assert naive["memory_ratio"] == naive["cpu_ratio"] == 1.0
    for row in chunked:
        assert row["memory_ratio"] == pytest.approx(row["peak_mib"] / naive["peak_mib"])
        assert row["cpu_s"] > 0 and row["gradients_mib"] >= 4 * VOCABULARY * 32 / MIB
