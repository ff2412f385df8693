"""Whole runs with rollout workers on Ray: the results of one process, and a signal that ends such a run."""

import time

import pytest
from runs import finish, rows_of, start, weights_of

from mtrl.record.run import Run

SHORT = ["model.warm_start.check_every=30", "model.warm_start.max_steps=30", "trainer.save_trajectories_every=1"]
OF_WORKERS = ("engine/workers", "engine/worker_restarts")
PATIENCE = 300


def tokens_of(run_dir):
    """Return the sampled ids of all training trajectories."""
    found = Run.open(run_dir).trajectories("train")
    return [(t.group_id, t.index, [turn.action_ids for turn in t.turns]) for t in found]


@pytest.mark.slow
def test_workers_give_the_results_of_one_process(tmp_path):
    for count in (0, 1, 3):
        words = ["trainer.max_steps=2", "evaluation.every_steps=2", f"rollouts.workers={count}"]
        finish(start(tmp_path / str(count), *SHORT, *words))
    alone, one, three = (tmp_path / str(count) for count in (0, 1, 3))
    rows = [{key: value for key, value in row.items() if key not in OF_WORKERS} for row in rows_of(one)]
    assert rows == rows_of(alone) and weights_of(one) == weights_of(alone)
    assert tokens_of(three) == tokens_of(alone) and tokens_of(alone)
    assert rows_of(three)[-1]["engine/workers"] == 3


@pytest.mark.slow
def test_a_signal_saves_a_run_with_workers_which_resumes(tmp_path):
    words = [*SHORT, "rollouts.workers=2", "evaluation.every_steps=0", "trainer.checkpoint.every_steps=1"]
    process = start(tmp_path / "run", *words, "trainer.max_steps=500")
    deadline = time.monotonic() + PATIENCE
    while not list((tmp_path / "run" / "checkpoints").glob("step_*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    output = finish(process, expected=75)
    assert "SIGTERM: saved at step" in output and "Traceback" not in output
    step = Run.open(tmp_path / "run").rows[-1]["step"]
    finish(start(tmp_path / "run", *words, f"trainer.max_steps={step + 2}", "resume=latest"))
    assert Run.open(tmp_path / "run").rows[-1]["step"] == step + 2
