"""Rows of the service desk: splits, worked example, decoys, and the weak demonstrator."""

import random

import pytest

from envs.service import FAMILY
from envs.service.data import CASES, is_held_out
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError
from tests.envs.episodes import trajectory_of
from tests.envs.service.cases import outcome


def ids(rows):
    return {row["id"].removeprefix("service-") for row in rows}


def test_held_out_cases_do_not_depend_on_the_seed(splits):
    other = FAMILY.load(DataConfig(synthetic_train_rows=600, synthetic_test_rows=120), seed=1)
    for loaded in (splits, other):
        assert all(map(is_held_out, ids(loaded.test))) and not any(map(is_held_out, ids(loaded.train)))
    assert 0.1 < sum(map(is_held_out, CASES)) / len(CASES) < 0.15
    first, second = ({row["id"]: row["orders"] for row in loaded.train} for loaded in (splits, other))
    assert all(first[name] != second[name] for name in first.keys() & second.keys())


def test_the_same_seed_gives_the_same_rows(splits):
    assert FAMILY.load(DataConfig(synthetic_train_rows=5, synthetic_test_rows=5), seed=0).train == splits.train[:5]


def test_rows_of_a_file_are_refused():
    with pytest.raises(UserError, match="data.path=x has no effect"):
        FAMILY.load(DataConfig(path="x"), seed=0)


def test_decoys_are_wrong_after_a_right_conversation(splits):
    for row in splits.test[:30]:
        *before, _ = FAMILY.gold(row)
        wrong = FAMILY.decoys(row)
        assert len(wrong) >= 4
        assert {FAMILY.score(trajectory_of([*before, text]), row) for text in wrong} == {0.0}


@pytest.fixture(scope="module")
def demonstrations(splits):
    rng = random.Random(0)
    return [(row, FAMILY.demonstrate(row, rng).responses) for row in splits.train]


def test_the_success_rate_of_the_demonstrator_is_low_and_not_zero(demonstrations):
    won = [outcome(row, responses) for row, responses in demonstrations]
    assert all(reward == score for reward, score in won)
    assert 0.3 < sum(reward for reward, _ in won) / len(won) < 0.45


def test_most_demonstrations_do_not_look_at_the_order(demonstrations):
    looked = sum(any("get_order" in text for text in responses) for _, responses in demonstrations)
    assert 0.2 < looked / len(demonstrations) < 0.4


def test_demonstrations_contain_every_call(demonstrations):
    shown = "".join(text for _, responses in demonstrations for text in responses)
    tools = ("get_order", "cancel_order", "change_address", "refund_order", "refuse_request", "end_conversation")
    assert all(name in shown for name in tools)


def test_held_out_rows_are_not_demonstrated(splits):
    with pytest.raises(ValueError, match="held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))
