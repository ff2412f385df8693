"""All names of a model, on a run that was really trained; a repeated evaluation changes nothing."""

import json
import shutil

import pytest

from mtrl.types import Trajectory, read_trajectories
from tests.evaluation.conftest import TASK
from tests.evaluation.outputs import metrics_of, report_of, trajectories_of

FEW = ["evaluation.rows=2", "evaluation.sampled_rows=0", "evaluation.samples_per_row=1", "evaluation.output=out"]


def test_a_run_is_compared_with_its_start(compared, run):
    """The command of the guide writes all files, and its numbers are those of the run's own evaluation."""
    done, out = compared.done, compared.folder / "out"
    assert done.status == 0, done.err
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.yaml",
        "models.json",
        "metrics.jsonl",
        "run.log",
        "report.json",
        "report.md",
        "report.html",
    }
    assert (out / "tokenizer" / "tokenizer.json").exists()
    before, after = metrics_of(out)
    assert (before["step"], after["step"]) == (0, 2)
    assert (
        all(key.startswith(("base/val/", "base/eval/reward")) for key in before if key != "step")
        and "base/val/success/mean" in before
    )
    own = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    greedy = [key for key in own if key.startswith("val/") and "sampled" not in key and "pass_k" not in key]
    assert {key: after[key] for key in greedy} == {key: own[key] for key in greedy} and len(greedy) > 10
    assert {"val/reward/pass_k_3", "val/success/pass_k_3"} <= after.keys() and after["val/episodes"] == 12
    assert after["eval/reward"] == after["val/reward/mean"]
    counts = {name: len(lines) for name, lines in trajectories_of(out).items()}
    labels = ("base", "small-step_2")
    assert counts == {f"{label}_{kind}.jsonl": n for label in labels for kind, n in (("greedy", 12), ("sampled", 18))}
    for word in (
        "success",
        "pass@3",
        "claims",
        "completion",
        "better by, points",
        "report.html",
        "small-step_2: export",
    ):
        assert word in done.out
    assert (out / "run.log").read_text().count("pass@3")
    assert (out / "report.html").read_text().count("<svg") >= 6


def test_trajectories_are_scored_rewarded_and_in_order(compared):
    trajectories = list(read_trajectories(compared.folder / "out" / "trajectories" / "small-step_2_sampled.jsonl"))
    assert [(t.group_id, t.index) for t in trajectories] == [
        (f"eval/sampled/{n}", i) for n in range(6) for i in range(3)
    ]
    assert all(isinstance(t, Trajectory) and t.score in (0.0, 1.0) and t.turns[0].components for t in trajectories)
    assert len({turn.text for t in trajectories[:3] for turn in t.turns[:1]}) > 1, "samples of a row differ"
    assert all(version == 2 for t in trajectories for turn in t.turns for version in turn.versions)


def test_two_evaluations_are_byte_identical(evaluate, compared, tmp_path):
    assert evaluate(*compared.words, "evaluation.output=two").status == 0
    one, two = compared.folder / "out", tmp_path / "two"
    assert (one / "metrics.jsonl").read_bytes() == (two / "metrics.jsonl").read_bytes()
    assert trajectories_of(one) == trajectories_of(two) and report_of(one) == report_of(two)


@pytest.mark.parametrize(
    ("words", "step", "kind", "twin"),
    [
        (["{run}/checkpoints/best"], 2, "checkpoint", "export"),
        (["{run}/checkpoints/step_000001"], 1, "checkpoint", "checkpoints/latest"),
        (["{run}/export"], 2, "export", "checkpoints/latest"),
        ([*TASK, "evaluation.model={run}/export"], 2, "export", "checkpoints/latest"),
        (TASK, 0, "base", "export"),
    ],
)
def test_forms(evaluate, run, tmp_path, words, step, kind, twin):
    """All names of the weights of the last step give the same tokens, and other weights give other tokens."""
    words = [word.format(run=run) for word in words]
    done = evaluate(*words, *FEW, f"evaluation.compare=[{run}/{twin}]")
    assert done.status == 0, done.err
    rows = {row["step"]: row for row in metrics_of(tmp_path / "out")}
    assert set(rows) == {step, 2} and "val/success/mean" in rows[step]
    assert any(key.endswith("/val/success/mean") for key in rows[2]), "the other model's, whatever their steps are"
    assert json.loads((tmp_path / "out" / "models.json").read_text())[0]["kind"] == kind
    one, two = (
        [[(turn["action_ids"], turn["action_logprobs"]) for turn in t["turns"]] for t in trajectories]
        for trajectories in trajectories_of(tmp_path / "out").values()
    )
    assert (one == two) == (step == 2)


def test_a_model_folder_anywhere(evaluate, run, tmp_path):
    shutil.copytree(run / "export", tmp_path / "some model")
    done = evaluate(*TASK, "evaluation.model='some model'", *FEW)
    assert done.status == 0, done.err
    (row,) = metrics_of(tmp_path / "out")
    assert row["step"] == 0 and row["val/episodes"] > 0


def test_a_checkpoint_needs_nothing_of_training(evaluate, run, tmp_path):
    """No optimiser, no export, no cache of the warm start: weights, tokenizer and configuration are enough."""
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("export", "optimizer.*", "rng.*", "trajectories"))
    import mtrl.trainer.setup.parts

    def refuse(*args):
        raise AssertionError("the warm start was asked for")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtrl.trainer.setup.parts, "warm_start", refuse)
        done = evaluate(bare, *FEW, f"evaluation.compare=[{run}]")
    assert done.status == 0, done.err
    one, two = trajectories_of(tmp_path / "out").values()
    assert one == two and "bare-step_2: checkpoint, step 2" in done.out


def test_a_damaged_checkpoint(evaluate, run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    file = broken / "checkpoints" / "step_000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    done = evaluate(broken / "checkpoints" / "step_000002", "evaluation.output=out")
    assert done.status == 2 and "cannot be loaded" in done.err and "\n" not in done.err
