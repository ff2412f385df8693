"""Rows of sop: labels that two computations agree on, balanced labels, and disjoint splits."""

import json
import logging

import pytest

from envs.sop import FAMILY
from envs.sop.data import CASES, final_output, is_held_out
from envs.sop.domain import carry_out
from envs.sop.domains import DOMAINS
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from mtrl.models.tiny import train_tokenizer


def test_rows_are_complete_and_json(splits):
    assert len(splits.train) == 4096 and len(splits.test) == 256
    assert json.loads(json.dumps(splits.test)) == splits.test
    ids = [row["id"] for row in splits.train + splits.test]
    assert len(set(ids)) == len(ids)
    for row in splits.test:
        assert row["prompt"] == [{"role": "user", "content": f"{DOMAINS[row['domain']].order}\n{row['case']}"}]
        assert row["ground_truth"].keys() == DOMAINS[row["domain"]].fields.keys()


@pytest.mark.parametrize("name", DOMAINS)
def test_every_domain_has_enough_rows_alone(name):
    splits = FAMILY.load(DataConfig(), 0, domain=name)
    assert len(splits.train) == 4096 and len(splits.test) == 256
    assert {row["domain"] for row in splits.train + splits.test} == {name}


def test_splits_share_no_case_whatever_the_seed(splits):
    others = [FAMILY.load(DataConfig(), seed=seed) for seed in (1, 2)]
    train = {row["id"] for each in (splits, *others) for row in each.train}
    test = {row["id"] for each in (splits, *others) for row in each.test}
    assert not train & test and len(train) > 5000
    for row in (*splits.train, *splits.test):
        assert is_held_out(row["domain"], row["case"]) == (row["split"] == "test")


def test_generation_is_a_function_of_the_seed(splits):
    assert FAMILY.load(DataConfig(), seed=0) == splits
    assert FAMILY.load(DataConfig(), seed=1).train != splits.train


def test_the_record_is_hidden_from_the_prompt(splits):
    """The id of a case does not determine its record: another seed gives the same case another record."""
    other = {row["id"]: row["ground_truth"] for row in FAMILY.load(DataConfig(), seed=1).train}
    both = [(row["ground_truth"], other[row["id"]]) for row in splits.train if row["id"] in other]
    assert sum(a == b for a, b in both) < 0.1 * len(both)


@pytest.mark.parametrize("name", DOMAINS)
def test_following_the_procedure_gives_the_labels(name, splits):
    """The labels are computed from the hidden record; the answer here follows from the tools and the procedure."""
    for row in (*splits.train, *splits.test):
        if row["domain"] == name:
            assert carry_out(DOMAINS[name], row["case"], row["fixture"])[1] == row["ground_truth"], row["id"]


@pytest.mark.slow
@pytest.mark.parametrize(("split", "each"), [("train", 16), ("test", 1)])
def test_gold_is_rewarded_and_scored_one_on_all_rows(splits, split, each, play, score):
    """The test covers all held-out cases and one of sixteen of the other cases, which are made in the same way."""
    for row in getattr(splits, split)[::each]:
        responses = FAMILY.gold(row)
        results = play(row, responses)
        assert len(results) == len(responses) and results[-1].reward == 1.0 == score(responses, row), row["id"]
        assert sum(result.reward for result in results) == 1.0


def test_gold_is_rewarded_and_scored_one(splits, play, score):
    lengths = set()
    for row in splits.test[:90]:
        responses = FAMILY.gold(row)
        results = play(row, responses)
        assert (
            [result.reward for result in results]
            == [0.0] * (len(responses) - 1) + [1.0]
            == [
                *[0.0] * (len(responses) - 1),
                score(responses, row),
            ]
        )
        assert not any(result.metrics["tool_errors"] for result in results)
        lengths.add(len(responses))
    assert lengths == {2, 3, 4, 5}, "eight turns are half as many again as one needs"


@pytest.mark.parametrize("name", DOMAINS)
def test_labels_have_exactly_the_values_that_the_prompt_names(name, splits):
    truths = [row["ground_truth"] for row in splits.train if row["domain"] == name]
    for field, values in DOMAINS[name].fields.items():
        named = values.split(" | ")
        seen = {truth[field] for truth in truths}
        words = {value for value in named if " " not in value}
        assert words <= seen
        assert words == seen or len(named) > len(words)


def test_full_prompts_contain_the_procedure_and_the_answer_form():
    for row in FAMILY.load(DataConfig(), 0, prompt="full").test[:3]:
        domain = DOMAINS[row["domain"]]
        system, user = row["prompt"]
        assert domain.procedure in system["content"] and user["content"] == f"{domain.case}: {row['case']}"
        shown = system["content"].partition("<final_output>")[2].partition("</final_output>")[0]
        assert json.loads(shown).keys() == row["ground_truth"].keys()


def test_the_procedures_name_every_tool_that_they_use_and_no_other(splits):
    for row in splits.train[:90]:
        for calls in carry_out(DOMAINS[row["domain"]], row["case"], row["fixture"])[0]:
            assert all(name in DOMAINS[row["domain"]].procedure for name, _ in calls)


def test_the_fixed_pieces_of_json_are_one_token_each(splits):
    """An episode of ten calls then stays under 150 tokens, and decoding gives its text back."""
    rows = splits.train[:60]
    tokenizer = train_tokenizer([[*row["prompt"]] for row in rows], 512, FAMILY.tokens)
    assert len(set(FAMILY.tokens)) == len(FAMILY.tokens) < 100
    for row in rows:
        for text in FAMILY.gold(row):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            pieces = [token for token in tokenizer.convert_ids_to_tokens(ids) if token in FAMILY.tokens]
            assert "".join(pieces).count('"') == text.count('"')


def test_fewer_cases_than_requested_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        splits = FAMILY.load(
            DataConfig(synthetic_test_rows=len(CASES), max_test_rows=None), 0, domain="order_fulfilment"
        )
    assert 0 < len(splits.test) < len(CASES) and "order" in splits.test[0]["id"]
    assert f"{len(splits.test)} different test cases instead of {len(CASES)}" in caplog.text


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"domain": "cooking"}, "environment.config.domain=cooking is not known; choose one of aircraft_inspection"),
        ({"tools_spec": "tools.json"}, "tools_spec=tools.json is of one domain; set environment.config.domain"),
        ({"sop_bench": "nowhere"}, "environment.config.sop_bench=nowhere is no folder"),
    ],
)
def test_invalid_settings_are_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.load(DataConfig(), 0, **config)


def test_final_output_is_what_the_parser_reads():
    assert final_output({"a": "b"}) == '<final_output>{"a": "b"}</final_output>'
