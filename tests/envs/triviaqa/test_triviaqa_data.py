"""Rows of triviaqa: complete, answerable by search, with disjoint places; loaders of real questions."""

import json

import pytest

from envs.triviaqa import FAMILY, encyclopaedia
from envs.triviaqa.data import is_held_out
from envs.triviaqa.retriever import open_retriever
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError

WORDS = [*encyclopaedia.FIRST, *encyclopaedia.SECOND, *encyclopaedia.FACTS]
VALUES = [value for values in encyclopaedia.FACTS.values() for value in values]
REAL = [
    {
        "question": f"Which city is number {n}?",
        "question_id": f"tc_{n}",
        "entity_pages": {"wiki_context": ["long " * 100]},
        "answer": {
            "value": f"City {n}",
            "aliases": [f"City {n}", f"The City of {n}"],
            "normalized_aliases": [f"city {n}", f"city of {n}"],
            "type": "WikipediaEntity",
        },
    }
    for n in range(16)
]


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_rows_are_complete_and_json(splits):
    assert json.loads(json.dumps(splits.train)) == splits.train
    rows = splits.train + splits.test
    assert len(rows) == len(encyclopaedia.places()) * len(encyclopaedia.FACTS) == len({r["question"] for r in rows})
    assert len({row["id"] for row in rows}) == len(rows)
    assert rows[0]["prompt"] == [{"role": "user", "content": rows[0]["question"]}]


def test_a_place_is_trained_on_or_held_out_whatever_the_seed(splits):
    other = FAMILY.load(DataConfig(max_test_rows=None), seed=1)
    train, test = ({row["place"] for each in (splits, other) for row in getattr(each, s)} for s in ("train", "test"))
    assert not train & test and len(train) > 1000 and len(test) > 100
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))


def test_every_word_of_a_held_out_question_is_known_from_training(splits):
    """The tiny tokenizer would otherwise split a value into several tokens, which are harder to copy."""
    known = {word for row in splits.train for word in row["question"].split()}
    assert {word for row in splits.test for word in row["question"].split()} <= known


def test_facts_do_not_follow_from_names_or_other_facts():
    """No answer can be memorised: values are equally frequent for every first and every second word."""
    for kind, values in encyclopaedia.FACTS.items():
        for names, part in ((encyclopaedia.FIRST, 0), (encyclopaedia.SECOND, 1)):
            for name in names:
                facts = [encyclopaedia.fact(p, kind) for p in encyclopaedia.places() if p.split()[part] == name]
                most = max(map(facts.count, values))
                assert most <= 10, (kind, name)  # of 36; by chance 2 of each of 16


def test_no_word_is_part_of_another():
    """`search_hit` of the published rewards searches for substrings."""
    assert len({*WORDS, *VALUES}) == len(WORDS) + len(VALUES)
    assert not [(value, word) for value in VALUES for word in [*WORDS, *VALUES] if value != word and value in word]


def test_the_whole_name_finds_the_article_and_half_of_it_mostly_another():
    retriever = open_retriever()
    places = encyclopaedia.places()
    found = [hits[0].passage.title for hits in retriever.search(places, topk=1)]
    assert found == places
    halves = [place.split()[n % 2] for n, place in enumerate(places)]
    right = [hits[0].passage.title == place for hits, place in zip(retriever.search(halves, 1), places, strict=True)]
    assert sum(right) < 0.05 * len(places)


def test_generation_is_a_function_of_the_seed(splits):
    first, again, other = (FAMILY.load(DataConfig(), seed=seed) for seed in (0, 0, 1))
    assert first == again and first.train != other.train
    assert splits.train[:4096] == first.train


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_is_rewarded_and_scored_one(splits, split, play, score):
    for row in getattr(splits, split)[:150]:
        responses = FAMILY.gold(row)
        results = play(row, responses)
        assert sum(r.reward for r in results) == pytest.approx(1.0) and score(responses, row) == 1.0


def test_decoys_look_right_and_are_wrong(splits, play, score):
    for row in splits.test[:20]:
        first, last = FAMILY.gold(row)
        assert len(FAMILY.decoys(row)) == 15 and last not in FAMILY.decoys(row)
        for decoy in FAMILY.decoys(row)[:4]:
            assert score([first, decoy], row) == 0.0
            assert sum(r.reward for r in play(row, [first, decoy])) == pytest.approx(0.0, abs=1e-12)


def test_fewer_rows_than_requested_are_logged(caplog):
    splits = FAMILY.load(DataConfig(synthetic_test_rows=5000, max_test_rows=None), 0)
    assert f"{len(splits.test)} test rows instead of 5000" in caplog.text and len(splits.train) == 4096


def test_rows_of_triviaqa(tmp_path):
    path = lines(tmp_path / "rows.jsonl", REAL)
    splits = FAMILY.load(DataConfig(path=path), 0)
    assert [row["id"] for row in splits.test] == ["tc_0", "tc_8"] and len(splits.train) == 14
    row = splits.test[1]
    assert row["ground_truth"] == {"answers": ["City 8", "The City of 8"]}
    assert [m["role"] for m in row["prompt"]] == ["system", "user"] and row["prompt"][1]["content"] == row["question"]
    assert "wiki_search" in row["prompt"][0]["content"] and "entity_pages" not in row
    assert FAMILY.gold(row)[1].endswith("<answer> City 8</answer>") and len(FAMILY.decoys(row)) == 4


def test_rows_of_triviaqa_in_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(REAL)
    for split in ("train", "validation"):
        parquet.write_table(table.slice(0 if split == "train" else 12, 12), tmp_path / f"{split}.parquet")
    splits = FAMILY.load(DataConfig(path=str(tmp_path)), 0)
    assert [row["ground_truth"]["answers"][0] for row in splits.test] == [f"City {n}" for n in range(12, 16)]


def test_plain_rows(tmp_path):
    rows = [
        {"question": "a?", "answers": ["x", "y", "x", " "], "split": "train"},
        {"question": "b?", "answers": [1969, "in 1969"], "split": "train"},
        {"question": "c?", "answers": None, "answer": 1969, "split": "train"},
        {"question": "d?", "answers": '["x", "y"]', "split": "train"},  # as CSV holds a list
        {"question": "e?", "answer": "z", "split": "test"},
    ]
    splits = FAMILY.load(DataConfig(path=lines(tmp_path / "rows.jsonl", rows)), 0)
    answers = [row["ground_truth"]["answers"] for row in splits.train + splits.test]
    assert answers == [["x", "y"], ["1969", "in 1969"], ["1969"], ["x", "y"], ["z"]]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "a?"}, "row train-0 of data.path has no answer; write answers"),
        ({"question": "a?", "answers": [" ", None]}, "has no answer"),
        ({"question": "a?", "answer": {"value": "<unk>", "aliases": []}}, "set data.test_split=validation"),
        ({"question": " ", "answer": "x"}, "row train-0 of data.path has question=' '; write the question as text"),
        ({"answer": "x"}, "row train-0 of data.path has question=None"),
    ],
)
def test_invalid_rows_are_refused(tmp_path, row, sentence):
    path = lines(tmp_path / "rows.jsonl", [{**row, "split": "train"}, {**REAL[0], "split": "test"}])
    with pytest.raises(UserError, match=sentence):
        FAMILY.load(DataConfig(path=path), 0)


@pytest.mark.parametrize("setting", [{"corpus": "articles.jsonl"}, {"url": "http://127.0.0.1:9"}])
def test_generated_questions_need_their_own_encyclopaedia(setting):
    with pytest.raises(UserError, match="does not hold what generated questions ask for; set data.path"):
        FAMILY.load(DataConfig(), 0, **setting)


def test_loaded_questions_are_answered_from_a_corpus(tmp_path, corpus, play, score):
    rows = [{"question": "What is the capital of France?", "answers": ["Paris"]}, {"question": "b?", "answer": "z"}]
    row = FAMILY.load(DataConfig(path=lines(tmp_path / "rows.jsonl", rows)), 0, corpus=corpus).test[0]
    results = play(row, FAMILY.gold(row), corpus=corpus)
    assert sum(r.reward for r in results) == pytest.approx(1.0) and score(FAMILY.gold(row), row) == 1.0


def test_full_prompts_for_generated_rows(play):
    row = FAMILY.load(DataConfig(synthetic_train_rows=1, synthetic_test_rows=1), 0, prompt="full").train[0]
    assert row["style"] == "full" and "wiki_search" in row["prompt"][0]["content"]
    first, _ = play(row, FAMILY.gold(row))
    assert first.observation.startswith(f"<result>\n{row['place']}\n")
