"""Synthetic and real rows: splits, gold answers, determinism."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.gsm8k import FAMILY, prompts
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data" / "gsm8k"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason=f"no GSM8K in {REAL}")


@pytest.fixture(scope="module")
def synthetic():
    return FAMILY.load(DataConfig(), seed=0, calculator=True, operations=3)


def test_synthetic_rows_are_complete():
    splits = FAMILY.load(DataConfig(), seed=1)
    assert (len(splits.train), len(splits.test)) == (4096, 256)
    for row in splits.train + splits.test:
        assert {"id", "prompt", "ground_truth", "question"} <= row.keys()
        assert int(row["ground_truth"]["answer"]) > 0


def test_no_problem_is_in_both_splits(synthetic):
    train, test = ({row["key"] for row in rows} for rows in (synthetic.train, synthetic.test))
    assert not train & test
    assert len(train) == len(synthetic.train)
    other = FAMILY.load(DataConfig(), seed=7, calculator=True, operations=3)
    assert not {row["key"] for row in other.train} & test, "a problem is held out under every seed or under none"


def test_operations_bound_the_expressions():
    splits = FAMILY.load(DataConfig(synthetic_train_rows=300), seed=0, operations=1)
    assert all(sum(row["expression"].count(op) for op in "+-*/") == 1 for row in splits.train)


@pytest.mark.parametrize("operations", [4, 0, True, 2.0, "no", None])
def test_operations_are_a_whole_number_within_bounds(operations):
    with pytest.raises(UserError, match=rf"operations={operations!r} must be a whole number from 1 to 3"):
        FAMILY.load(DataConfig(), seed=0, operations=operations)


def test_more_rows_than_problems(monkeypatch):
    monkeypatch.setattr("envs.gsm8k.problems.MAX_MISSES", 50)
    monkeypatch.setattr("envs.gsm8k.problems.TEMPLATES", tiny_templates())
    with pytest.raises(UserError, match=r"synthetic_train_rows=4096 .* ask for fewer"):
        FAMILY.load(DataConfig(), seed=0)


def tiny_templates():
    from envs.gsm8k.problems import TEMPLATES, Template

    return (Template(1, TEMPLATES[0].story, TEMPLATES[0].expression, {"a": (1, 9), "b": (1, 9)}),)


@pytest.mark.parametrize("calculator", [True, False])
@pytest.mark.parametrize("reward", ["default", "guide"])
def test_synthetic_gold_scores_one(calculator, reward, play_responses):
    splits = FAMILY.load(DataConfig(), seed=0, calculator=calculator, operations=3)
    for row in splits.train + splits.test:
        trajectory = play_responses(row, FAMILY.gold(row), max_turns=2, reward=reward, calculator=calculator)
        assert (trajectory.reward, FAMILY.score(trajectory, row)) == (1.0, 1.0), row


def test_rows_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib, json, random; from envs.gsm8k import FAMILY; from mtrl.config.schema import DataConfig;"
        "splits = FAMILY.load(DataConfig(synthetic_train_rows=200), seed=3, calculator=True);"
        "moves = [FAMILY.demonstrate(row, random.Random(i)).act(None) for i, row in enumerate(splits.train)];"
        "print(hashlib.sha256(json.dumps([splits.train, splits.test, moves]).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_the_family_is_light():
    code = "import sys, envs.gsm8k; print(sorted({'torch', 'datasets', 'pyarrow', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@needs_real
@pytest.mark.parametrize("reward", ["default", "guide"])
def test_gold_of_all_real_rows_scores_one(reward, play_responses):
    splits = FAMILY.load(DataConfig(path=str(REAL), max_test_rows=None), seed=0)
    assert (len(splits.train), len(splits.test)) == (7473, 1319)
    for row in splits.train + splits.test:
        assert FAMILY.gold(row) == [row["answer"]], "the solution itself is well-formatted"
        trajectory = play_responses(row, FAMILY.gold(row), reward=reward)
        assert (trajectory.reward, FAMILY.score(trajectory, row)) == (1.0, 1.0), row


@needs_real
def test_real_prompts():
    row = FAMILY.load(DataConfig(path=str(REAL)), seed=0).train[0]
    assert row["prompt"] == [{"role": "user", "content": row["question"] + prompts.MULTI_TURN}]
    assert row["ground_truth"] == {"answer": "72"}
    helped = FAMILY.load(DataConfig(path=str(REAL), max_train_rows=1), seed=0, calculator=True).train[0]
    assert helped["prompt"][0]["content"].endswith(prompts.MULTI_TURN + prompts.CALCULATOR)


def skyrl_row(index, split, answer="1,072"):
    question = f"{split} question {index}?"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question + prompts.MULTI_TURN}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": answer.replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": f"Add.\n#### {answer}"},
    }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_skyrl_rows(tmp_path, play_responses):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    for split, name in (("train", "train"), ("test", "validation")):
        table = pyarrow.Table.from_pylist([skyrl_row(index, split) for index in range(3)])
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    splits = FAMILY.load(DataConfig(path=str(tmp_path)), seed=0)
    row = splits.test[1]
    assert row["prompt"] == skyrl_row(1, "test")["prompt"]
    assert (row["question"], row["ground_truth"]) == ("test question 1?", {"answer": "1072"})
    assert FAMILY.gold(row) == ["Add.\n#### 1,072"]
    assert play_responses(row, FAMILY.gold(row)).reward == 1.0


def test_an_empty_prompt_is_none_and_a_negative_price_has_decoys(tmp_path):
    row = {"prompt": "", "question": "a?", "answer": "-$5"}
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "question": f"{n}?"} for n in range(2)])
    row = FAMILY.load(DataConfig(path=str(tmp_path / "rows.jsonl")), seed=0).train[0]
    assert row["prompt"] == [{"role": "user", "content": "1?" + prompts.MULTI_TURN}]
    assert row["ground_truth"] == {"answer": "-5"} and FAMILY.decoys(row)[0] == "#### -4"


def test_an_answer_without_a_number_names_the_row(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"question": "a?", "answer": "#### 1"}, {"question": "b?", "answer": "two"}])
    write_jsonl(tmp_path / "test.jsonl", [{"question": "c?", "answer": "#### 1"}])
    with pytest.raises(UserError, match=r"row train-1 of data.path has the answer 'two'"):
        FAMILY.load(DataConfig(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("answer", ["3,14", "10,00", ",5", "1,00,000"])
def test_a_comma_that_separates_no_thousands_is_refused(answer, tmp_path):
    """Without its comma, 3,14 would be 314."""
    write_jsonl(tmp_path / "rows.jsonl", [{"question": f"{n}?", "answer": answer} for n in range(2)])
    with pytest.raises(UserError, match=f"has the answer '{answer}'; write a number, such as 1,000 or 3.14"):
        FAMILY.load(DataConfig(path=str(tmp_path / "rows.jsonl")), seed=0)


def test_decoys_are_wrong_and_well_formed(play_responses):
    rows = FAMILY.load(DataConfig(synthetic_train_rows=200), seed=0).train
    rows += [{"id": "r", "ground_truth": {"answer": answer}} for answer in ("0", "-3", "2.5", "1")]
    for row in rows:
        decoys = FAMILY.decoys(row)
        assert len(set(decoys)) >= 3
        for decoy in decoys:
            for scheme, reward in (("default", 0.0), ("guide", 0.2)):
                trajectory = play_responses(row, [decoy], max_turns=1, reward=scheme)
                assert (trajectory.reward, FAMILY.score(trajectory, row)) == (reward, 0.0), "a wrong answer in form"
