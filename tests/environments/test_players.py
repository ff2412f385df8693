"""Mistakes in `gold` and `demonstrate` are sentences with the function, the row, and the line of the user's file."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mtrl.environments.family import Recital
from mtrl.environments.players import PlayerError, demonstrator_moves, gold_responses
from mtrl.errors import UserError
from tests.echo import echo_family

ROW = {"id": "r1"}


def absent(row, rng=None):
    return row["answer"]


def rejecting(row, rng=None):
    raise UserError("row r1 has no table")


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        (absent, r"^gold of echo failed on row r1: KeyError in test_players.py, line \d+: 'answer'; fix gold$"),
        (lambda row: "123", "^gold of echo returned '123' for row r1; return a list of texts, one for each turn$"),
        (lambda row: None, "returned None for row r1"),
        (lambda row: [1, 2], r"returned \[1, 2\] for row r1"),
    ],
)
def test_mistakes_in_gold_are_named(gold, message):
    with pytest.raises(PlayerError, match=message):
        gold_responses(replace(echo_family(), gold=gold), ROW)


def test_gold_returns_a_list():
    assert gold_responses(replace(echo_family(), gold=lambda row: ("look", "7")), ROW) == ["look", "7"]


@pytest.mark.parametrize(
    ("demonstrate", "message"),
    [
        (absent, r"^demonstrate of echo failed on row r1: KeyError in test_players.py, line \d+: .*; fix demonstrate$"),
        (lambda row, rng: ["7"], r"^demonstrate of echo returned \['7'\] for row r1; return an object with act"),
    ],
)
def test_mistakes_in_demonstrate_are_named(demonstrate, message):
    with pytest.raises(PlayerError, match=message):
        demonstrator_moves(replace(echo_family(), demonstrate=demonstrate), ROW, random.Random(0))


def test_a_row_that_a_player_rejects_is_no_mistake():
    family = replace(echo_family(), gold=rejecting, demonstrate=rejecting)
    for play in (lambda: gold_responses(family, ROW), lambda: demonstrator_moves(family, ROW, random.Random(0))):
        with pytest.raises(UserError, match="^row r1 has no table$") as caught:
            play()
        assert type(caught.value) is UserError


def test_the_end_of_the_demonstrators_responses_is_none():
    left = iter(["look"])
    family = replace(echo_family(), demonstrate=lambda row, rng: SimpleNamespace(act=lambda observation: next(left)))
    move = demonstrator_moves(family, ROW, random.Random(0))
    assert [move(None), move("7"), move("7")] == ["look", None, None]
    move = demonstrator_moves(replace(family, demonstrate=lambda row, rng: Recital(["a", "b"])), ROW, random.Random(0))
    assert [move(None) for _ in range(3)] == ["a", "b", "b"]
