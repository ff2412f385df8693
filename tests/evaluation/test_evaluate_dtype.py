"""A run that computes in bfloat16 is evaluated in bfloat16, with the episodes of its own evaluation, bit for bit."""

import pytest

from mtrl.command.compose import compose
from mtrl.config.plain_yaml import load_config
from mtrl.types import read_trajectories
from tests.evaluation.conftest import TASK

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("half")]  # one worker trains


@pytest.fixture(scope="module")
def half(run, tmp_path_factory):
    """The folder of a run of two steps with bfloat16 passes, from the warm start of `run`."""
    from mtrl.trainer.run import train

    folder = tmp_path_factory.mktemp("runs") / "half"
    quiet = ["tracker.plots=false", "preflight.at_start=none", "evaluation.before_train=false"]
    train(compose([*TASK, *quiet, "trainer.fsdp.param_dtype=bfloat16", f"run_dir={folder}"]))
    return folder


def greedy(file):
    return {t.task_id: [(x.action_ids, x.action_logprobs) for x in t.turns] for t in read_trajectories(file)}


def test_episodes_are_those_of_the_runs_own_evaluation(evaluate, half, tmp_path):
    done = evaluate(half, "evaluation.output=out", "evaluation.sampled_rows=0")
    assert done.status == 0, done.err
    own = greedy(half / "trajectories" / "eval_greedy_step_000002.jsonl")
    assert greedy(tmp_path / "out" / "trajectories" / "half-step_2_greedy.jsonl") == own
    assert load_config(tmp_path / "out" / "config.yaml").trainer.fsdp.param_dtype == "bfloat16"


def test_a_checkpoint_is_evaluated_in_the_same_dtype(evaluate, half, tmp_path):
    words = ("evaluation.rows=4", "evaluation.sampled_rows=0", "evaluation.output=out")
    done = evaluate(half / "checkpoints" / "latest", f"evaluation.compare=[{half}/export]", *words)
    assert done.status == 0, done.err
    checkpoint, export = (greedy(file) for file in (tmp_path / "out" / "trajectories").glob("*.jsonl"))
    assert checkpoint == export and len(export) == 4


def test_float32_can_be_asked_for(evaluate, half, tmp_path):
    words = ("evaluation.sampled_rows=0", "trainer.fsdp.param_dtype=float32", "evaluation.output=out")
    done = evaluate(half, *words)
    assert done.status == 0 and "changes nothing" not in done.err, done.err
    own = greedy(half / "trajectories" / "eval_greedy_step_000002.jsonl")
    assert greedy(tmp_path / "out" / "trajectories" / "half-step_2_greedy.jsonl") != own
