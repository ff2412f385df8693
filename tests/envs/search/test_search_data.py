"""Rows of search, generated and from files: complete, solvable, with disjoint splits."""

import json
import logging
import re
from pathlib import Path

import pytest

from envs.search import FAMILY
from envs.search.prompts import SEARCH_R1, SEARCH_R1_SYSTEM
from envs.search.world import Chain, is_held_out
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError

SMALL = {"synthetic_train_rows": 300, "synthetic_test_rows": 60}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path):
    rows = [{"id": n, "contents": f'"Number {n}"\nThe number {n} has the name n{n}.'} for n in range(30)]
    return str(write_jsonl(tmp_path / "corpus.jsonl", rows))


# Generated


def test_rows_are_complete_and_json(splits):
    assert (len(splits.train), len(splits.test)) == (1500, 256)
    assert json.loads(json.dumps(splits.train)) == splits.train
    ids = [row["id"] for row in splits.train + splits.test]
    assert len(set(ids)) == len(ids)
    assert len({row["key"] for row in splits.test}) == len(splits.test), "twice would count too much"
    for row in splits.train[:200]:
        chain = Chain(**row["chain"])
        assert row["prompt"] == [{"role": "user", "content": chain.terse}] and row["key"] == chain.key
        assert row["ground_truth"]["target"] == [chain.value]


def chains_of(row):
    """All chains that the passages of a row contain."""
    facts = [text.split() for _, text in row["ground_truth"]["passages"]]
    homes = [fact for fact in facts if fact[1] in ("works", "born")]
    things = [fact for fact in facts if fact not in homes]
    return [" ".join([*home, *thing[1:]]) for home in homes for thing in things if thing[0] == home[2]]


def test_splits_share_no_chain_whatever_the_seed(splits):
    others = [FAMILY.load(DataConfig(**SMALL), seed=seed) for seed in (1, 2, 3)]
    test = {row["key"] for each in (splits, *others) for row in each.test}
    assert all(map(is_held_out, test)) and len(test) > 400
    for row in (row for each in (splits, *others) for row in each.train):
        chains = chains_of(row)
        assert row["key"] in chains and len(chains) == 16
        assert not test & set(chains) and not any(map(is_held_out, chains)), (
            "no training world contains a held-out chain"
        )


def test_more_test_rows_than_there_are_questions_end_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("envs.search.data.MOST_MISSES", 2)
    rows = FAMILY.load(DataConfig(synthetic_train_rows=0, synthetic_test_rows=10**6), seed=0).test
    assert 0 < len({row["key"] for row in rows}) == len(rows)
    assert "different test rows instead of 1000000: there are no more" in caplog.text


def test_generation_is_a_function_of_the_seed(splits):
    assert FAMILY.load(DataConfig(synthetic_train_rows=1500), seed=0) == splits
    assert FAMILY.load(DataConfig(**SMALL), seed=1).train != FAMILY.load(DataConfig(**SMALL), seed=2).train


@pytest.mark.parametrize("prompt", ["short", "full"])
def test_gold_is_rewarded_and_scored_one(prompt, play, score):
    splits = FAMILY.load(DataConfig(**SMALL), 0, prompt=prompt)
    for row in splits.train + splits.test:
        responses = FAMILY.gold(row)
        results = play(row, responses)
        assert len(results) == 3 and results[-1].reward == score(responses, row) == 1.0
        assert results[1].metrics["hits"] == 1.0, "the second search shows the answer"


def test_decoys_look_right_and_are_wrong(splits, play, score):
    for row in splits.test[:50]:
        *before, last = FAMILY.gold(row)
        decoys = FAMILY.decoys(row)
        assert len(decoys) == 3 and last not in decoys
        passages = " ".join(text for _, text in row["ground_truth"]["passages"])
        for decoy in decoys:
            assert decoy.removeprefix("<answer>").removesuffix("</answer>") in passages
            results = play(row, [*before, decoy])
            assert score([*before, decoy], row) == results[-1].reward == 0.0


def test_rows_for_language_models():
    row = FAMILY.load(DataConfig(**SMALL), 0, prompt="full").train[0]
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    assert row["prompt"][1]["content"] == row["question"]
    assert all(text.endswith(".") and title in text for title, text in row["ground_truth"]["passages"])
    assert len(FAMILY.decoys(row)) == 3


@pytest.mark.parametrize("config", [{"retriever": "server", "url": "http://x"}, {"corpus": "c.jsonl"}, {"timeout": 3}])
def test_retrievers_that_generated_rows_do_not_use_are_refused(config):
    with pytest.raises(UserError, match="data.path=null: generated rows bring their own passages"):
        FAMILY.load(DataConfig(**SMALL), 0, **config)


# Search-R1, SkyRL and plain rows


def skyrl_row(n):
    question = f"What is the name of the number {n}?"
    return {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "system", "content": SEARCH_R1_SYSTEM}, {"role": "user", "content": SEARCH_R1 + question}],
        "ability": "fact-reasoning",
        "env_class": "search",
        "reward_spec": {"style": "rule", "ground_truth": {"target": [f"n{n}", f"N-{n}"]}},
        "extra_info": {"index": n, "need_tools_kwargs": True, "question": question, "split": "train"},
        "metadata": None,
    }


def search_r1_row(n):
    """The row has the form of Search-R1's own files."""
    row = skyrl_row(n)
    spec = row.pop("reward_spec")
    return {
        **row,
        "id": f"q{n}",
        "question": row["extra_info"]["question"],
        "reward_model": spec,
        "golden_answers": [f"n{n}"],
    }


@pytest.mark.parametrize("make", [skyrl_row, search_r1_row])
def test_rows_of_other_frameworks(make, tmp_path, corpus, play, score):
    import pyarrow
    from pyarrow import parquet

    for name, numbers in (("train", range(8)), ("test", range(8, 12))):
        parquet.write_table(pyarrow.Table.from_pylist([make(n) for n in numbers]), tmp_path / f"{name}.parquet")
    splits = FAMILY.load(DataConfig(path=str(tmp_path)), 0, corpus=corpus)
    assert (len(splits.train), len(splits.test)) == (8, 4)
    row = splits.test[0]
    assert row["ground_truth"] == {"target": ["n8", "N-8"]} and row["prompt"] == make(8)["prompt"]
    assert row["question"] == "What is the name of the number 8?"
    for row in splits.train + splits.test:
        responses = FAMILY.gold(row)
        results = play(row, responses, corpus=corpus)
        assert results[0].metrics["hits"] == 1.0
        assert results[-1].reward == score(responses, row) == 1.0


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ({"answer": "n1"}, ["n1"]),
        ({"answer": ["n1", "n1", "one"]}, ["n1", "one"]),
        ({"answers": ["n1"]}, ["n1"]),
        ({"answers": {"text": ["n1", "one"], "answer_start": [3, 4]}}, ["n1", "one"]),
        ({"golden_answers": ["n1"]}, ["n1"]),
        ({"answer": 1}, ["1"]),
        ({"ground_truth": {"target": "n1"}}, ["n1"]),
        ({"ground_truth": {"target": ["n1"]}, "answer": "other"}, ["n1"]),
        ({"answers": ["", " ", "n1"]}, ["n1"]),
        ({"golden_answers": '["n1", "one"]'}, ["n1", "one"]),  # as CSV holds a list
        ({"answers": '{"text": ["n1"], "answer_start": [3]}'}, ["n1"]),
        ({"answer": "[n1] one"}, ["[n1] one"]),
    ],
)
def test_plain_rows(answer, target, tmp_path, corpus):
    rows = [{"question": f"number {n}?", **answer} for n in range(9)]
    splits = FAMILY.load(DataConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows))), 0, corpus=corpus)
    assert {tuple(row["ground_truth"]["target"]) for row in splits.train + splits.test} == {tuple(target)}
    assert splits.train[0]["prompt"][1]["content"] == SEARCH_R1 + "number 1?"
    assert not {row["question"] for row in splits.train} & {row["question"] for row in splits.test}
    assert FAMILY.decoys(splits.train[0]) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "who?"}, "row train-0 of data.path has no answer; write answer or answers"),
        ({"question": "who?", "answer": []}, "has no answer"),
        ({"question": "who?", "answer": [None, " "]}, "has no answer"),
        ({"answer": "n1"}, "has no prompt; it needs a column prompt or question"),
    ],
)
def test_bad_plain_rows(row, message, tmp_path, corpus):
    file = write_jsonl(tmp_path / "rows.jsonl", [row] * 9)
    with pytest.raises(UserError, match=message):
        FAMILY.load(DataConfig(path=str(file)), 0, corpus=corpus)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "environment.config.corpus=null: there is nothing to search"),
        (
            {"retriever": "bing", "corpus": "CORPUS"},
            "retriever='bing' does not exist; choose one of bm25, dense, server",
        ),
        ({"retriever": "server"}, "retriever=server needs url"),
        ({"retriever": "server", "url": "http://127.0.0.1:9", "corpus": "CORPUS"}, "is not read with retriever=server"),
        ({"corpus": "CORPUS", "url": "http://x"}, "retriever=bm25 makes no use of url"),
        ({"corpus": "CORPUS", "timeout": 3}, "retriever=bm25 has no option 'timeout'"),
        ({"corpus": "nowhere.jsonl"}, "corpus nowhere.jsonl cannot be read"),
    ],
)
def test_invalid_retrievers_are_refused_before_the_run(config, message, tmp_path, corpus):
    config = {name: corpus if value == "CORPUS" else value for name, value in config.items()}
    file = write_jsonl(tmp_path / "rows.jsonl", [{"question": f"{n}?", "answer": "n"} for n in range(9)])
    with pytest.raises(UserError, match=message):
        FAMILY.load(DataConfig(path=str(file)), 0, **config)


# SQuAD


def test_squad_is_data_and_corpus(squad, play, score, caplog):
    with caplog.at_level(logging.WARNING):
        splits = FAMILY.load(DataConfig(path=str(squad)), 0)
    assert "left out 8 questions without an answer" in caplog.text
    rows = splits.train + splits.test
    assert len(rows) == 32 and len({row["id"] for row in rows}) == 32 and splits.test
    assert json.loads(json.dumps(rows)) == rows
    row = next(row for row in rows if row["id"] == "Warsaw-3-0")
    assert row["ground_truth"] == {"target": ["Vistula", "the Vistula"]}
    assert row["prompt"][1]["content"] == SEARCH_R1 + "Where is it? (3)"
    responses = ["<search>Warsaw capital copy 3</search>", "<answer>the vistula.</answer>"]
    results = play(row, responses)
    assert results[0].observation.startswith(
        "<information>Doc 1(Title: Warsaw) Warsaw is the capital of Poland. It stands on the Vistula. This is copy 3.\n"
    )
    assert results[0].metrics["hits"] == results[1].reward == score(responses, row) == 1.0


def test_a_question_that_is_held_out_is_not_trained_on(squad, caplog):
    """The test covers questions that occur with another passage too."""
    content = json.loads(squad.read_text())
    for article in content["data"]:
        for question in article["paragraphs"][0]["qas"][:1]:
            question["question"] = "Where is it?"
    squad.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        splits = FAMILY.load(DataConfig(path=str(squad)), 0)
    assert "Where is it?" in {row["question"] for row in splits.test}
    assert not {row["question"] for row in splits.train} & {row["question"] for row in splits.test}
    assert re.search(r"and \d\d of training that are held out as well", caplog.text)


def test_the_questions_of_a_passage_are_in_one_split(squad):
    splits = FAMILY.load(DataConfig(path=str(squad)), 0)
    passages = [{row["id"].rpartition("-")[0] for row in rows} for rows in (splits.train, splits.test)]
    assert not passages[0] & passages[1]
    assert FAMILY.load(DataConfig(path=str(squad)), 7) == splits, "the split is a property of the passage"


def test_questions_of_squad_with_another_corpus(squad, corpus, play):
    splits = FAMILY.load(DataConfig(path=str(squad)), 0, corpus=corpus)
    (result,) = play(splits.train[0], ["<search>number 7 Warsaw</search>"], corpus=corpus)
    assert "Doc 1(Title: Number 7) The number 7 has the name n7." in result.observation
    assert "Poland" not in result.observation


def test_questions_of_squad_with_dense_retrieval(squad, play):
    pytest.importorskip("faiss")
    row = FAMILY.load(DataConfig(path=str(squad)), 0, retriever="dense", encoder="hashing").train[0]
    (result,) = play(
        row, ["<search>What is the atomic number of oxygen?</search>"], retriever="dense", encoder="hashing"
    )
    assert "Doc 1(Title: Oxygen)" in result.observation


@pytest.mark.parametrize("articles", [[3], [{}], [{"paragraphs": [{"qas": [{"question": "?"}]}]}], [{"paragraphs": 3}]])
def test_broken_squad_files(articles, tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    with pytest.raises(UserError, match=r"data\[0\]"):
        FAMILY.load(DataConfig(path=str(path)), 0)


def test_two_questions_of_squad_with_one_id_are_refused(squad):
    squad.write_text(squad.read_text().replace('"Warsaw-3-0"', '"Warsaw-4-0"'))
    with pytest.raises(UserError, match="two questions have id=Warsaw-4-0; make the ids unique"):
        FAMILY.load(DataConfig(path=str(squad)), 0)


def test_a_squad_file_with_too_few_passages(tmp_path):
    path = tmp_path / "squad.json"
    article = {"paragraphs": [{"context": "c", "qas": [{"question": "?", "answers": [{"text": "a"}]}]}]}
    path.write_text(json.dumps({"data": [article]}))
    with pytest.raises(UserError, match="leaves no (training|held-out) rows"):
        FAMILY.load(DataConfig(path=str(path)), 0)


def test_lists_of_rows_are_not_read_as_squad(tmp_path, corpus):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": f"{n}?", "answer": "n"} for n in range(9)]))
    assert len(FAMILY.load(DataConfig(path=str(path)), 0, corpus=corpus).train) == 7
    assert Path(corpus).exists()
