"""A run whose episodes fold their context."""

import json
from itertools import pairwise

from mtrl.rescore.__main__ import main as rescore
from mtrl.types import read_trajectories
from tests.trainer.runs import NO_EVALUATION, finish, rows_of, start


def test_summaries_are_sampled_trained_recorded_and_rescored(tmp_path, capsys):
    """The trainer computes the log-probs that the engine reported, so both saw the same contexts."""
    run_dir = tmp_path / "run"
    fold = ["generator.context.fold=summarise", "generator.context.threshold=1"]
    finish(start(run_dir, *NO_EVALUATION, *fold, "trainer.max_steps=2", "trainer.save_trajectories_every=1"))
    rows = rows_of(run_dir)
    assert rows[-1]["step"] == 2 and rows[-1]["rollout/breaks"] == rows[-1]["rollout/breaks/fold"] > 0
    assert rows[-1]["analysis/logprob_drift/max"] < 1e-4 and rows[-1]["rollout/turns/max"] <= 3

    files = sorted((run_dir / "trajectories").glob("*.jsonl"))
    trained = [t for file in files if file.name.startswith("train") for t in read_trajectories(file)]
    pairs = [pair for t in trained for pair in pairwise(t.turns)]
    summaries = [(turn, after) for turn, after in pairs if turn.is_summary]
    assert summaries and all(turn.advantages == after.advantages for turn, after in summaries)
    assert any(turn.advantages for turn, _ in summaries) and all(turn.trainer_logprobs for turn, _ in summaries)

    assert rescore([str(run_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_rescored"] == [] and report["all"]["changed"] == 0
    evaluated = [t for file in files if file.name.startswith("eval") for t in read_trajectories(file)]
    assert len(report["trajectories"]) == len(trained) + len(evaluated)
