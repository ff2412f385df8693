"""The launch variables of the environment, and runs that torchrun starts and restarts."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from rank_groups import ROOT

from mtrl.errors import UserError
from mtrl.utils import process
from tests import forked


@pytest.fixture
def set_rank(monkeypatch):
    def set_rank(rank, **more):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"} | more
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_rank


def test_without_torchrun_there_is_no_launch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # variables of a program that started this one
    assert not process.is_launched() and not process.is_follower() and process.launch_id() is None


def test_rank_and_size_are_read_from_the_environment(set_rank):
    set_rank("0")
    assert process.is_launched() and not process.is_follower()
    set_rank("1")
    assert process.is_follower()
    set_rank("one")
    with pytest.raises(UserError, match="RANK=one"):
        process.is_follower()


def test_the_id_is_that_of_the_launch(set_rank, monkeypatch):
    """The id is equal for the children of one agent, and differs for another agent, another rendezvous, or a reused
    process id."""
    set_rank("0")
    code = "from mtrl.utils.process import launch_id; print(launch_id())"
    ids = [subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() for _ in range(2)]
    assert ids[0] == ids[1] != process.launch_id()
    assert f":{os.getpid()}:" in ids[0]
    first = process.launch_id()
    set_rank("0", TORCHELASTIC_RUN_ID="mine")
    assert process.launch_id() != first
    set_rank("0")
    monkeypatch.setattr(process, "start_time", lambda pid: "later")
    assert process.launch_id() != first
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert process.launch_id() is None


def test_the_launch_imports_no_torch():
    code = "import sys, mtrl.utils.process, mtrl.utils.signals, mtrl.errors; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).strip() == "False"


TRAINING = """
# Stands in for training: saves at the first step, and loses a rank in the first attempt.
import json, os, signal, sys, types
from contextlib import closing
from pathlib import Path
from mtrl.utils import process
from mtrl.utils.signals import Interrupt

class Worker:
    def step(self, attempt):
        if attempt == 0 and process.is_follower():
            os.kill(os.getpid(), signal.SIGKILL)
        return attempt, process.is_follower()

def join():
    from mtrl.distributed.rank_group import RankGroup
    from mtrl.distributed.world import World
    world = World.join(60.0)
    return closing(world), RankGroup(world, Worker())

def train(cfg, hooks):
    run, attempt = Path(cfg.run_dir), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (run / "metrics.jsonl").touch()
    (run / f"attempt_{attempt}").write_text(json.dumps([cfg.resume, cfg.seed]))
    closing_world, rank_group = join()
    with Interrupt(), closing_world:
        try:
            (run / "result").write_text(json.dumps(rank_group.run("step", None, attempt)))
        finally:
            rank_group.dismiss()
    return {}

def follow():
    closing_world, rank_group = join()
    with closing_world:
        rank_group.follow()

sys.modules["mtrl.trainer.run"] = types.SimpleNamespace(train=train, follow=follow)
from mtrl.main import cli
cli()
"""


FORK = ("--start-method=fork", "--run-path")
"""Options of a torchrun that forks its ranks, so that they import nothing again."""


def torchrun(folder, program, *words, run=subprocess.run):
    (folder / "program.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return run(
        [*command, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.slow
def test_a_restart_by_torchrun_continues_the_run(tmp_path):
    """All attempts use one folder, although its default name contains the time."""
    done = torchrun(tmp_path, TRAINING, *FORK, "--max-restarts=1", "program.py", "seed=3", run=forked.run)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs/gsm8k").iterdir()
    assert json.loads((run / "attempt_0").read_text()) == ["none", 3]
    assert json.loads((run / "attempt_1").read_text()) == ["latest", 3]
    assert json.loads((run / "result").read_text()) == [[1, False], [1, True]]
    assert "rank 0 of 2: rank 1 is lost (" in done.stderr
    assert "warning: torchrun has started this run again: it goes on in" in done.stderr
    assert (
        done.stdout.count(f"gsm8k in {run.relative_to(tmp_path)}") == 2
    )  # printed only by the leader, in each attempt


@pytest.mark.slow
def test_torchrun_ends_when_the_configuration_is_wrong(tmp_path):
    """Followers wait for a leader that never joins, and torchrun's signal ends them. torchrun and its ranks are started
    as programs, in this test alone."""
    done = torchrun(tmp_path, TRAINING, "program.py", "algorithm.group_size=1")
    assert done.returncode == 1
    message = "algorithm.group_size=1 gives algorithm.advantage_method=turn_rloo nothing to compare"
    assert done.stderr.count(message) == 1
    assert "forcefully exiting" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
