"""`data.validation_rows`: rows of the training split that a run evaluates on, so that it never sees the test split."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrl.command.compose import compose
from mtrl.datasets import Splits, cut_validation
from mtrl.environments.factory import load_task
from mtrl.errors import UserError
from mtrl.types import read_trajectories
from tests.evaluation.conftest import TASK
from tests.evaluation.outputs import metrics_of


def row(name, text=None, answer="1"):
    prompt = [{"role": "user", "content": name if text is None else text}]
    return {"id": name, "prompt": prompt, "ground_truth": {"answer": answer}, "split": "train"}


def rows_of(texts):
    return [row(f"r{n}", text) for n, text in enumerate(texts)]


def texts_of(rows):
    return [r["prompt"][0]["content"] for r in rows]


TEXTS = st.lists(st.text("abcdef", min_size=1, max_size=3), min_size=12, max_size=40)


def test_none_is_none():
    splits = Splits(rows_of("abc"), rows_of("de"))
    assert cut_validation(splits, 0) is splits and splits.validation == []
    assert splits.held_out == splits.test


@given(TEXTS, st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=5), st.integers(1, 4))
def test_splits_share_no_prompt_and_lose_no_other_row(train, test, count):
    splits = Splits(rows_of(train), rows_of(test))
    if count >= len(set(train) - set(test)) or 2 * len(set(train)) <= len(train):
        return
    cut = cut_validation(splits, count)
    assert cut.test == splits.test and cut.held_out == cut.validation
    chosen = texts_of(cut.validation)
    assert len(chosen) == len(set(chosen)) == count and not set(chosen) & {*texts_of(cut.train), *test}
    assert cut.train == [r for r in splits.train if r["prompt"][0]["content"] not in chosen], (
        "order, and all the others"
    )
    assert all(r in splits.train for r in cut.validation), "a row is not changed"


@given(
    st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=8, max_size=30), st.text("gh", min_size=1), st.randoms()
)
def test_neither_order_nor_more_rows_move_others_across(texts, new, rng):
    texts = sorted(texts)
    before = set(texts_of(cut_validation(Splits(rows_of(texts), []), 4).validation))
    rng.shuffle(texts)
    assert set(texts_of(cut_validation(Splits(rows_of(texts), []), 4).validation)) == before
    texts.insert(rng.randrange(len(texts)), new)
    after = set(texts_of(cut_validation(Splits(rows_of(texts), []), 4).validation))
    assert after == before or (new in after and len(before - after) == 1)


def test_duplicate_rows_are_removed_and_reported(caplog):
    texts = [*"abcdefgh", *"abc"]
    cut = cut_validation(Splits(rows_of(texts), []), 7)
    twins = len(set("abc") & set(texts_of(cut.validation)))
    assert twins and len(cut.train) == len(texts) - 7 - twins
    assert f"dropped {twins} training rows that are twins" in caplog.text


def test_rows_with_equal_prompts_differ_by_their_ground_truth():
    """All secret codes have the same prompt, so that rows differ only by their ground truth."""
    train = [row(f"r{n}", "break the code", str(n % 30)) for n in range(40)]
    test = [row(f"t{n}", "break the code", str(n)) for n in range(5)]
    cut = cut_validation(Splits(train, test), 10)
    truths = [{r["ground_truth"]["answer"] for r in rows} for rows in (cut.train, cut.validation, cut.test)]
    assert len(cut.validation) == len(truths[1]) == 10
    assert not truths[1] & truths[0] and not truths[1] & truths[2]


@pytest.mark.parametrize("count", [3, 4, 100])
def test_nothing_left_to_train_on(count):
    message = f"data.validation_rows={count} leaves nothing to train on, for the training split has 3 different rows"
    with pytest.raises(UserError, match=message):
        cut_validation(Splits(rows_of("aabc"), []), count)


@pytest.mark.parametrize("name", ["gsm8k", "text_to_sql", "games", "sop"])
def test_families(name):
    """Every family loads with the setting. The rows do not depend on the order, and have no demonstrations."""
    from omegaconf import OmegaConf

    words = [f"experiment={name}", "data.synthetic_train_rows=64", "data.validation_rows=8"]
    task = load_task(OmegaConf.to_object(compose(words)))
    splits = task.splits
    assert len(splits.validation) == 8 and len(splits.train) <= 56
    ids = [{r["id"] for r in rows} for rows in (splits.train, splits.validation, splits.test)]
    assert not ids[0] & ids[1] and not ids[1] & ids[2]
    shuffled = Splits(random.Random(0).sample([*splits.train, *splits.validation], 64), splits.test)
    assert {r["id"] for r in cut_validation(shuffled, 8).validation} == ids[1]


def test_a_run_evaluates_on_them_and_so_can_an_evaluation(evaluate, tmp_path):
    from mtrl.trainer.run import train

    folder = tmp_path / "run"
    quiet = ["tracker.plots=false", "preflight.at_start=none", "evaluation.before_train=false", "trainer.max_steps=1"]
    few = ["evaluation.rows=5", "evaluation.sampled_rows=0", "evaluation.samples_per_row=1"]
    summary = train(compose([*TASK, *quiet, *few, "data.validation_rows=5", f"run_dir={folder}"]))
    assert summary["split"] == "validation"
    evaluated = [t.task_id for t in read_trajectories(folder / "trajectories" / "eval_greedy_step_000001.jsonl")]
    assert len(evaluated) == 5 and all(name.startswith("train-") for name in evaluated)
    trained = [t.task_id for t in read_trajectories(folder / "trajectories" / "train_step_000001.jsonl")]
    assert not set(trained) & set(evaluated)
    done = evaluate(folder, "evaluation.split=validation", "evaluation.output=out")
    assert done.status == 0, done.err
    own = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics_of(tmp_path / "out")[0]["val/reward/mean"] == own["val/reward/mean"]
    again = [t.task_id for t in read_trajectories(tmp_path / "out" / "trajectories" / "run-step_1_greedy.jsonl")]
    assert again == evaluated


def test_a_run_without_validation_rows_reports_the_test_split(run):
    assert json.loads((run / "summary.json").read_text())["split"] == "test"
