"""Whole runs with rollout workers on Ray: the results of one process, and a signal that ends such a run."""

import time

import pytest
from runs import finish, rows_of, start, weights_of

from mtrl.record.run import Run

SHORT = [
    "trainer.max_steps=3",
    "trainer.save_trajectories_every=1",
    "trainer.checkpoint.every_steps=1",
    "evaluation.every_steps=0",
]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("worker_runs")]

OF_WORKERS = ("engine/workers", "engine/worker_restarts")
PATIENCE = 300


def tokens_of(run_dir):
    """Return the sampled ids of all training trajectories."""
    found = Run.open(run_dir).trajectories("train")
    return [(t.group_id, t.index, [turn.action_ids for turn in t.turns]) for t in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run without workers."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(run_dir, *SHORT))
    return run_dir


def test_a_resumed_run_with_a_worker_gives_the_results_of_one_process(alone, tmp_path):
    words = [*SHORT, "rollouts.workers=1", f"resume={alone}/checkpoints/step_000002"]
    finish(start(tmp_path / "one", *words))
    rows = [{key: value for key, value in row.items() if key not in OF_WORKERS} for row in rows_of(tmp_path / "one")]
    assert rows == rows_of(alone)[-1:] and rows[0]["step"] == 3 and weights_of(tmp_path / "one") == weights_of(alone)


@pytest.mark.ci
def test_a_signal_saves_a_run_with_workers_which_resumes(alone, tmp_path):
    """Two workers sample the tokens of one process in the first two steps; later the last bits of weights differ."""
    process = start(tmp_path / "run", *SHORT, "rollouts.workers=2", "trainer.max_steps=500")
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "run" / "checkpoints" / "step_000003").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    output = finish(process, expected=75)
    assert "SIGTERM: saved at step" in output and "Traceback" not in output
    assert rows_of(tmp_path / "run")[-1]["engine/workers"] == 2
    expected = tokens_of(alone)[: 2 * 4 * 4]
    assert len(expected) == 32 and tokens_of(tmp_path / "run")[:32] == expected
    step = Run.open(tmp_path / "run").rows[-1]["step"]
    finish(start(tmp_path / "run", *SHORT, f"trainer.max_steps={step + 1}", "resume=latest"))
    assert Run.open(tmp_path / "run").rows[-1]["step"] == step + 1
