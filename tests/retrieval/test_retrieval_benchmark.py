"""The benchmark of the retrievers runs and measures the right recall. Times are not tested."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parent.parent.parent


def run(folder, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / "retrieval.py"), *words]
    return forked.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def squad(tmp_path, passages):
    """Three of four questions contain the title of their passage; the fourth has no word of any passage."""
    paragraphs = [
        {
            "context": passage.contents,
            "qas": [{"question": f"What of {passage.title}?" if index % 4 else "zzz?", "answers": []}],
        }
        for index, passage in enumerate(passages[:40])
    ]
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"data": [{"title": "", "paragraphs": paragraphs}]}))
    return path


def test_recall_is_measured_in_process_and_through_the_server(tmp_path, squad):
    done = run(tmp_path, "--data", str(squad), "--threads", "8", "--repeats", "1", "--json", "out.json")
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["passages"], result["questions"]) == (40, 40)
    rows = {row["retriever"]: row for row in result["retrievers"]}
    assert list(rows) == ["bm25", "dense"]
    for row in rows.values():
        assert row["recall@1"] == row["recall@5"] == 0.75
        assert row["server_answers_equal"] is True
    printed = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [(words[0], words[1], words[-1]) for words in printed] == [
        ("bm25", "0.750", "yes"),
        ("dense", "0.750", "yes"),
    ]


def test_missing_data_is_one_sentence(tmp_path):
    done = run(tmp_path, "--data", "none.json")
    assert done.returncode == 2
    assert "none.json cannot be read" in done.stderr.splitlines()[-1]
