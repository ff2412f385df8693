"""Questions of a file in SQuAD's form: the splits share no passage and no question, and `search` reads their rows."""

import json
from contextlib import closing

import pytest

from envs.search import FAMILY
from experiments.smollm2 import xquad
from mtrl.config.schema import DataConfig

PASSAGES = [f"The tower of town {n} was built in {1000 + n}." for n in range(24)]
SHARED = "How high is the tower?"
"""A question that is asked about every passage."""


def asked(name, question, answer):
    return {"id": name, "question": question, "answers": [{"text": answer}, {"text": answer}]}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    paragraphs = [
        {
            "context": passage,
            "qas": [asked(f"own {n}", f"When was tower {n} built?", str(1000 + n)), asked(f"{n}", SHARED, "?")],
        }
        for n, passage in enumerate(PASSAGES)
    ]
    file = tmp_path_factory.mktemp("xquad") / "questions.json"
    file.write_text(json.dumps({"data": [{"paragraphs": paragraphs[:9]}, {"paragraphs": paragraphs[9:]}]}))
    return file


@pytest.fixture(scope="module")
def folder(source):
    counts = xquad.write(source, source.parent / "rows")
    assert min(counts.values()) >= 3
    return source.parent / "rows"


def rows(folder, split):
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_splits_share_no_passage_and_no_question(folder):
    train, test = rows(folder, "train"), rows(folder, "test")
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    held_out = {f"own {n}" for n, passage in enumerate(PASSAGES) if xquad.is_held_out(passage)}
    assert {row["id"] for row in test if row["question"] != SHARED} == held_out
    assert {row["id"] for row in train} == {f"own {n}" for n in range(len(PASSAGES))} - held_out
    assert all(len(row["answers"]) == 1 for row in train + test), "equal answers are one answer"


def test_gold_finds_the_passage_and_is_rewarded(source, folder):
    splits = FAMILY.load(DataConfig(path=str(folder)), 0, prompt="full", corpus=str(source))
    for row in splits.train + splits.test:
        if row["question"] != SHARED:
            with closing(FAMILY.environment(corpus=str(source))) as environment:
                environment.reset(row)
                search, answer = [environment.step(response, row["ground_truth"]) for response in FAMILY.gold(row)]
            assert row["ground_truth"]["target"][0] in search.observation
            assert answer.reward == 1.0 and answer.done, row["id"]
