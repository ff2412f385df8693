"""Runs whose processes are killed continue, and nothing is damaged, trained twice or lost: `experiments/kills/`, with
one kill of each kind. Its audit reports faults of a folder."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from runs import ROOT, SMALL

from mtrl.record.trajectories import write_groups
from mtrl.trainer.checkpoint.checkpoint import Checkpoints
from mtrl.trainer.checkpoint.saver import Saver
from mtrl.trainer.data.experience import Unused
from mtrl.types import FinishReason, Group, StopReason, Trajectory, Turn
from tests import forked

sys.path.insert(0, str(ROOT / "experiments" / "kills"))

from audit import Plan, audit_finished, audit_killed
from kills import table
from story import Killer, Moments
from targets import TARGETS, Target

QUICK = [
    "trainer.max_steps=10",
    "trainer.prompts_per_step=2",
    "evaluation.before_train=false",
    "evaluation.every_steps=0",
    "evaluation.sampled_rows=0",
    "evaluation.rows=4",
    "trainer.checkpoint.every_steps=1",
    "trainer.save_trajectories_every=1",
]
"""Settings that save every step and all trajectories, and are long enough for a kill in the middle."""
SOON = Moments({"step": 1.0}, step_seconds=0.05, least_steps=3, steps=3)
"""After step 3 the checkpoint of step 1 is complete, because that of step 2 waited for it."""


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")
FORKED_RANKS = (*RANKS, "--start-method=fork", "--run-path", str(ROOT / "mtrl" / "main.py"))
"""torchrun that forks its ranks, which then import nothing. `test_launch.py` starts them as programs."""


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@dataclass(frozen=True)
class Forked(Target):
    """A target that is forked from the server of `tests/forked.py`."""

    def start(self, run_dir, overrides, resume=False):
        words = [*overrides, *self.overrides, f"run_dir={run_dir}", *(["resume=latest"] if resume else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *self.command, *words]
        with run_dir.with_suffix(".log").open("ab") as log:
            return forked.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.xdist_group("kills")
@pytest.mark.parametrize("name", ["rank", "engine", "overlap"])  # test_run.py kills a synchronous run
def test_a_killed_run_continues(name, tmp_path):
    """The engine is a process that the run has started itself."""
    target = Forked(**vars(next(target for target in TARGETS if target.name == name)))
    if name == "rank":
        target = replace(target, command=FORKED_RANKS, processes=children)
    words = [*SMALL, *QUICK, *(["generator.local.process=false"] if name == "overlap" else [])]
    story = Killer(target, tmp_path / "run", words, random.Random(name), SOON).run(1)
    assert not story.faults, (tmp_path / "run.log").read_text()
    assert len(story.kills) == 1 and story.kills[0].step < 10 and story.kills[0].audit.checkpoints
    started = (tmp_path / "run.log").read_text()
    assert ("it is restarted" in started) == (name == "engine")
    assert ("has started this run again" in started) == (name == "rank")
    assert ("resumed from" in started) == (name != "engine")


BATCH, STEPS = 2, 3
PLAN = Plan([f"row{n}" for n in range(20)], BATCH, STEPS, lag=1)


def group(number, row=None, version=0):
    name = f"step{number // BATCH}/{number % BATCH}"
    turn = Turn([1], [2], [-0.5], [(version, 1)], FinishReason.STOP, "", {"role": "assistant", "content": ""})
    row = row or PLAN.rows[number]
    trajectories = [Trajectory(row, name, place, [turn], StopReason.DONE) for place in range(2)]
    return Group(name, {"id": row}, trajectories)


def write_step(run_dir, step, *groups):
    (run_dir / "trajectories").mkdir(parents=True, exist_ok=True)
    write_groups(run_dir / "trajectories", "train", step, groups)


def write_checkpoint(run_dir, step, drawn, *stored):
    checkpoints = Checkpoints(run_dir / "checkpoints")
    partial = checkpoints.begin(step)
    Saver().save({"model.weight": torch.ones(4), "optimizer.weight.step": torch.ones(())}, partial)
    unused = [Unused(0, 0, one).to_dict() for one in stored]
    return checkpoints.commit(partial, {"step": step, "rows_drawn": drawn}, unused)


@pytest.fixture
def run_dir(tmp_path):
    """Folder of a run that stopped after two of three steps: groups 0, 1, 3, 2 are trained, 4 and 5 are stored."""
    write_step(tmp_path, 1, group(0), group(1))
    write_step(tmp_path, 2, group(3), group(2))
    write_checkpoint(tmp_path, 1, 4, group(2), group(3))
    write_checkpoint(tmp_path, 2, 6, group(4), group(5))
    return tmp_path


def write_metrics(run_dir, *rows):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_intact_folder_has_no_faults(run_dir):
    audit = audit_killed(run_dir, PLAN)
    assert audit.checkpoints == 2 and not audit.faults
    write_step(run_dir, 3, group(4), group(5))
    write_metrics(run_dir, {"step": 0}, *({"step": n, "analysis/staleness/max": 1} for n in (1, 2, 3)))
    assert not audit_finished(run_dir, PLAN).faults


def test_steps_after_the_newest_checkpoint_are_not_counted(run_dir):
    write_step(run_dir, 3, group(1), group(5))
    assert not audit_killed(run_dir, PLAN).faults


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tensors.json", "rng.safetensors"])
def test_a_checkpoint_without_a_file_is_a_fault(run_dir, name):
    (run_dir / "checkpoints" / "step_000002" / name).unlink()
    assert len(audit_killed(run_dir, PLAN).corrupt) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tensors.json", "groups.jsonl"])
def test_a_checkpoint_with_an_incomplete_file_is_a_fault(run_dir, name):
    path = run_dir / "checkpoints" / "step_000002" / name
    path.write_bytes(path.read_bytes()[:-20])
    assert len(audit_killed(run_dir, PLAN).corrupt) == 1


@pytest.mark.parametrize(
    ("stored", "drawn", "doubled", "lost", "differences"),
    [
        ([group(4), group(2)], 6, ["step1/0", "row2"], ["step2/1", "row5"], []),
        ([group(4)], 6, [], ["step2/1", "row5"], []),
        ([group(4), group(5, "row3")], 6, ["row3"], ["row5"], ["step2/1 on row row3 was not drawn yet"]),
        ([group(4), group(5)], 5, [], [], ["step2/1 on row row5 was not drawn yet"]),
    ],
    ids=["trained and stored", "neither", "the row of another", "it would be drawn again"],
)
def test_inconsistent_groups_are_a_fault(run_dir, stored, drawn, doubled, lost, differences):
    write_checkpoint(run_dir, 2, drawn, *stored)
    audit = audit_killed(run_dir, PLAN)
    assert (audit.doubled, audit.lost, audit.differences) == (doubled, lost, differences)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([{"step": 1}, {"step": 2}], "metrics.jsonl has the steps [1, 2]"),
        ([{"step": 1}, {"step": 2}, {"step": 2}, {"step": 3}], "metrics.jsonl has the steps [1, 2, 2, 3]"),
        (
            [{"step": 1}, {"step": 2, "analysis/staleness/max": 2}, {"step": 3}],
            "step 2 trained a token that was too old",
        ),
    ],
)
def test_metrics_that_contradict_the_plan_are_a_fault(run_dir, rows, fault):
    write_step(run_dir, 3, group(4), group(5))
    write_metrics(run_dir, *rows)
    assert audit_finished(run_dir, PLAN).faults == [f"different: {fault}"]


def test_a_difference_from_the_undisturbed_run_is_a_fault(run_dir, tmp_path_factory):
    other = tmp_path_factory.mktemp("undisturbed")
    write_step(run_dir, 3, group(4), group(5))
    for folder, loss, weights in ((run_dir, 1.0, b"a"), (other, 2.0, b"b")):
        write_metrics(folder, *({"step": n, "train/loss": loss if n == 3 else 0.0} for n in (1, 2, 3)))
        (folder / "export").mkdir()
        (folder / "export" / "model.safetensors").write_bytes(weights)
    found = audit_finished(run_dir, PLAN, other).faults
    assert found == ["different: metrics of step 3", "different: the weights at the end"]


def test_the_table_counts_the_faults(run_dir):
    from story import Kill, Story

    write_checkpoint(run_dir, 2, 6, group(4))
    killed = Kill("save", 2, True, audit_killed(run_dir, PLAN))
    stories = [Story("process", "a", [killed]), Story("rank", "b", failure="it ended with 1")]
    lines = table(stories).splitlines()
    assert lines[2:] == [
        "| a synchronous run | 1 | 1 | 1 | 1 | 2 | 0 | 0 | 2 | 0 |",
        "| one of two ranks | 0 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 0 |",
        "| all | 1 | 1 | 2 | 1 | 2 | 0 | 0 | 2 | 0 |",
    ]
