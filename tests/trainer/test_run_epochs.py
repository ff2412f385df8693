"""A run whose length is given in epochs."""

import os
import subprocess
import sys
from collections import Counter

import pytest
import yaml
from runs import QUIET, ROOT, finish, rows_of

from mtrl.types import read_trajectories
from tests import forked

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("runs")]
WORDS = [
    "debug=fast",
    "data.synthetic_train_rows=6",
    "trainer.prompts_per_step=2",
    "trainer.save_trajectories_every=1",
    *QUIET,
]


def start(run_dir, *words):
    arguments = [sys.executable, "-m", "mtrl.main", *WORDS, *words, f"run_dir={run_dir}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return forked.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def drawn(run_dir):
    """Return how often each row was used in training."""
    files = sorted((run_dir / "trajectories").glob("train_*.jsonl"))
    groups = {(file.name, t.group_id, t.task_id) for file in files for t in read_trajectories(file)}
    return Counter(task for _, _, task in groups)


def test_every_row_is_drawn_once_per_epoch_and_a_resume_adds_epochs(tmp_path):
    run_dir = tmp_path / "run"
    printed = finish(start(run_dir, "trainer.epochs=1"))
    assert "trainer.epochs=1: 3 steps, by 6 rows" in printed
    assert "trainer.epochs=2" in printed.partition("train on from here:")[2].split("\n")[1].split()
    assert sorted(drawn(run_dir).values()) == [1] * 6 and rows_of(run_dir)[-1]["step"] == 3
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (config["trainer"]["max_steps"], config["trainer"]["epochs"]) == (3, None)
    finish(start(run_dir, "trainer.epochs=2", "resume=latest"))
    assert sorted(drawn(run_dir).values()) == [2] * 6 and rows_of(run_dir)[-1]["step"] == 6
