"""A run that resumes at an earlier checkpoint of its own folder, or after an evaluation that ended it."""

import json

import pytest
from runs import NO_EVALUATION, finish, rows_of, start

pytestmark = pytest.mark.slow

FAILING = """
from mtrl.errors import RunEndedError
from mtrl.scoring.heldout import HeldOut

run = HeldOut.run

async def fail(self, step, *args):
    if step == 2:
        raise RunEndedError("the budget of the judge is spent")
    return await run(self, step, *args)

HeldOut.run = fail
"""
"""A program whose evaluation at step 2 ends the run."""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_that_goes_back_continues_from_its_new_steps(tmp_path):
    run = tmp_path / "run"
    words = [*NO_EVALUATION, "trainer.prompts_per_step=2", "trainer.save_trajectories_every=1"]
    finish(start(run, *words, "trainer.max_steps=4", "algorithm.kl_loss_coef=0.5"))
    assert names(run / "checkpoints") == ["step_000002", "step_000004"]
    back = ["trainer.max_steps=3", "trainer.checkpoint.keep_last=1", "algorithm.kl_loss_coef=0.001"]
    printed = finish(start(run, *words, *back, f"resume={run}/checkpoints/step_000002"))
    assert "the run goes back to step 2, and its later checkpoints are now" in printed
    assert names(run / "checkpoints") == ["abandoned-step_000004", "step_000003"]
    rows = {row["step"]: row for row in rows_of(run)}
    assert list(rows) == [1, 2, 3] and "eval_greedy_step_000003.jsonl" in names(run / "trajectories")
    assert not any("step_000004" in name for name in names(run / "trajectories")), "of the steps before it went back"
    assert [rows[step]["train/kl_coef"] for step in (2, 3)] == [0.5, 0.001], "a fixed weight is that of the command"
    printed = finish(start(run, *words, "trainer.max_steps=4", "resume=latest"))
    assert "step_000003 at step 3" in " ".join(printed.split()) and "goes back" not in printed


def test_an_evaluation_that_ends_the_run_is_made_when_it_resumes(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    words = [*NO_EVALUATION, "trainer.prompts_per_step=2", "trainer.max_steps=2"]
    finish(start(whole, *words))
    assert "the budget of the judge is spent" in finish(start(run, *words, code=FAILING), expected=2)
    steps, expected = rows_of(run), rows_of(whole)
    assert steps[0] == expected[0] and steps[1].items() < expected[1].items(), "the row of step 2 has no evaluation"
    finish(start(run, *words, "resume=latest"))
    assert rows_of(run) == expected
    state = json.loads((run / "checkpoints" / "step_000002" / "state.json").read_text())
    assert state["score"] == expected[1]["val/success/mean"]
    finish(start(run, *words, "resume=latest"))
    assert rows_of(run) == expected, "an evaluation is made once"
