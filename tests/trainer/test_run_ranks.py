"""Whole runs of two ranks, also with sequences or matrices in two parts: they train as one process, which resumes from
their checkpoint, and a signal to torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
from unittest import mock

import pytest
from runs import NO_EVALUATION, ROOT, SMALL, finish, start

from tests import forked
from tests.divided_models import CAN_DIVIDE

pytestmark = pytest.mark.slow

STEADY = [
    "trainer.max_steps=4",
    "trainer.optimizer.lr=3e-4",
    "trainer.optimizer.eps=1e-6",  # Adam scales a gradient of rounding errors to the size of a real one
    "evaluation.every_steps=2",
    "evaluation.sampled_rows=0",
    "trainer.checkpoint.every_steps=2",
]
"""Settings under which the different rounding of one process and two does not change a sampled token."""


def finish_ranks(run_dir, *words):
    """Run the command line on two ranks, with the variables that torchrun sets."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    with mock.patch.dict(os.environ, shared):
        ranks = []
        for rank in ("0", "1"):
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            ranks.append(start(run_dir, *words))
    for process in ranks:
        finish(process)


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FORKED = ["--start-method=fork", "--run-path", str(ROOT / "mtrl" / "main.py")]
"""Options with which torchrun forks its ranks. After a signal such a torchrun waits 30 s for ranks that have ended."""


def torchrun(run_dir, *words, ranks=FORKED, popen=forked.Popen):
    """Start the command line under torchrun."""
    return popen(
        [sys.executable, *TORCHRUN, *ranks, *SMALL, *words, f"run_dir={run_dir}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows_of(run_dir):
    """Return the metrics by step, without those that depend on time."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows}


def assert_close(found, expected):
    assert found and found.keys() <= expected.keys()
    for step, row in found.items():
        assert row.keys() == expected[step].keys()
        assert row == pytest.approx(expected[step], abs=1e-4), step


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The metrics of one process, by step."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(run_dir, *STEADY))
    return rows_of(run_dir)


@pytest.mark.xdist_group("run_ranks")
def test_two_ranks_train_as_one_process_which_can_resume_them(tmp_path, alone):
    finish_ranks(tmp_path / "two", *STEADY)
    two = rows_of(tmp_path / "two")
    assert alone.keys() == two.keys() == set(range(5))
    assert_close(two, alone)
    half = tmp_path / "two" / "checkpoints" / "step_000002"
    assert {path.name for path in half.glob("model-rank*")} == {"model-rank0.safetensors", "model-rank1.safetensors"}
    finish(start(tmp_path / "half", *STEADY, f"resume={half}"))
    assert_close(rows_of(tmp_path / "half"), {step: row for step, row in alone.items() if step > 2})


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.sequence_parallel=2", "trainer.packing=true"],
        pytest.param(["trainer.tensor_parallel=2"], marks=[CAN_DIVIDE, pytest.mark.ci]),
    ],
)
@pytest.mark.xdist_group("run_ranks")
def test_two_ranks_that_share_each_batch_train_and_resume_as_one_process(tmp_path, alone, settings):
    words = [*STEADY, *settings]
    output = finish(torchrun(tmp_path / "two", *words))
    assert "in 2 parts" in output
    assert_close(rows_of(tmp_path / "two"), alone)
    half = tmp_path / "two" / "checkpoints" / "step_000002"
    later = {step: row for step, row in alone.items() if step > 2}
    finish_ranks(tmp_path / "half", *words, f"resume={half}")
    assert_close(rows_of(tmp_path / "half"), later)
    finish(start(tmp_path / "one", *STEADY, f"resume={half}"))
    assert_close(rows_of(tmp_path / "one"), later)


@pytest.mark.ci
def test_a_signal_saves_and_two_ranks_resume(tmp_path):
    words = [*STEADY, *NO_EVALUATION]
    endless = "trainer.max_steps=100"  # it cannot end before the signal
    process = torchrun(tmp_path / "run", *words, endless, ranks=["-m", "mtrl.main"], popen=subprocess.Popen)
    for line in process.stdout:
        if line.split()[:1] == ["3"]:  # the line of step 3
            break
    process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
    output, _ = process.communicate(timeout=120)
    assert "SIGTERM: saved at step" in output and "Traceback (most recent call last)" not in output.split("SIGTERM")[0]
    stopped = max(int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert 3 <= stopped < 100
    finish_ranks(tmp_path / "run", *words, f"trainer.max_steps={stopped + 1}", "resume=latest")
    assert rows_of(tmp_path / "run").keys() == set(range(1, stopped + 2))
