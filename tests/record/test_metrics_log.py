"""metrics.jsonl after a crash, and in a resumed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mtrl.errors import UserError
from mtrl.record.metrics import MetricsLog, unfinished


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(5):
        log.log(step, {"reward": step / 3})
    yield log
    log.close()


def steps(log):
    return [row["step"] for row in log.read()]


def test_rows_come_back_bit_for_bit(log):
    assert log.read()[1] == {"step": 1, "reward": 1 / 3}


def test_a_row_is_one_write(log, monkeypatch):
    written = []
    monkeypatch.setattr(os, "write", lambda file, data: written.append(data) or len(data))
    log.log(5, {"text": "line\nbreak"})
    assert written == [b'{"step": 5, "text": "line\\nbreak"}\n']


def test_every_row_is_strict_json(log):
    class Scalar:
        def item(self):
            return 7

    log.log(5, {"nan": float("nan"), "inf": -float("inf"), "tensor": Scalar(), "flag": True, "text": "é\ud800"})

    def refuse(name):
        raise AssertionError(name)

    line = log.path.read_text(encoding="utf-8").splitlines()[-1]
    row = json.loads(line, parse_constant=refuse)
    assert row == {"step": 5, "nan": None, "inf": None, "tensor": 7, "flag": True, "text": "é\ud800"}


def test_a_half_written_line_is_reported_and_replaced(log, capsys):
    with log.path.open("ab") as file:
        file.write(b'{"step": 5, "rew')
    assert steps(log) == [0, 1, 2, 3, 4]
    assert capsys.readouterr().err.startswith(f"warning: {log.path}:6 has no end, so this row is left out: ")
    resumed = MetricsLog(log.path)
    resumed.log(5, {})
    assert steps(resumed) == [0, 1, 2, 3, 4, 5]
    assert capsys.readouterr() == ("", "")


def test_truncate_removes_later_rows_and_the_half_written_line(log):
    before = log.path.read_bytes().splitlines(keepends=True)
    with log.path.open("ab") as file:
        file.write(b'{"step": 5')
    warnings = []
    log.warn = warnings.append
    log.truncate(2)
    assert warnings == [unfinished(log.path, 6)]
    assert log.path.read_bytes() == b"".join(before[:3])
    log.log(3, {"again": 1})
    assert log.read()[-1] == {"step": 3, "again": 1} and steps(log) == [0, 1, 2, 3]


def test_truncate_retains_earlier_rows_that_were_written_later(log):
    """Spans of a timeline have this order: a span of the next step may end before one of this step."""
    log.log(2, {"late": 1})
    log.log(5, {})
    log.truncate(2)
    assert steps(log) == [0, 1, 2, 2]
    log.log(3, {})
    assert steps(log) == [0, 1, 2, 2, 3]


def test_truncate_beyond_the_end_removes_nothing(log):
    with log.path.open("ab") as file:
        file.write(b"{")
    log.truncate(99)
    assert steps(log) == [0, 1, 2, 3, 4] and log.path.read_bytes().endswith(b"\n")


def test_truncate_of_a_missing_file(tmp_path):
    log = MetricsLog(tmp_path / "none.jsonl")
    log.truncate(3)
    assert log.read() == [] and not log.path.exists()


def test_full_disk_leaves_no_half_row(log, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:4]))
    with pytest.raises(OSError, match="no space left"):
        log.log(5, {})
    monkeypatch.undo()
    log.log(6, {})
    assert steps(log) == [0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize("line", ["{oops}", "[1]", '{"reward": 1}', '{"step": null}'])
def test_a_broken_row_is_named(log, line):
    with log.path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:6 is not a row of metrics"):
        log.read()


def test_killed_in_mid_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import itertools, sys; from mtrl.record.metrics import MetricsLog; log = MetricsLog(sys.argv[1])\n"
        "for step in itertools.count(): log.log(step, {'text': 'x' * 5000})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not (path.exists() and path.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    time.sleep(random.uniform(0.01, 0.05))
    process.send_signal(signal.SIGKILL)
    process.wait()
    log = MetricsLog(path)
    count = len(log.read())
    assert steps(log) == list(range(count))
    log.truncate(0)
    assert steps(log) == [0]
