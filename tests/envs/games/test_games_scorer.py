"""The scorer of the games: it replays the game, and agrees with the reward on any responses."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.games import FAMILY
from mtrl.types import Trajectory

PIECES = ["<move>", "</move>", "<think>", "</think>", "north", "east", "south", " ", ",", "\n", "\t", "\0", "\xa0"]
PIECES += ["7", "2", "5", "725", "７", "NORTH", "ſ", "<MOVE>", "x", "</"]
FREE = st.lists(st.sampled_from(PIECES), max_size=7).map("".join)
MOVE = st.sampled_from(["north", "east", "south", "west", " North\n", "east east", "7 2,5", "725", "72", "", "a" * 70])
FRAMED = st.tuples(st.sampled_from(["", "<think>hm", "</think>"]), MOVE, st.sampled_from(["", "!", "</think>"]))
RESPONSE = st.one_of(FREE, FRAMED.map(lambda parts: f"{parts[0]}<move>{parts[1]}</move>{parts[2]}"))


@settings(max_examples=400, deadline=None)
@given(responses=st.lists(RESPONSE, min_size=1, max_size=8))
def test_reward_and_score_agree(responses, truths, make_row, play, score):
    for truth in (*truths.values(), {"game": "maze", "grid": ["SG", ".."]}, {**truths["mastermind"], "code": "7"}):
        row = make_row(truth)
        results = play(row, responses, max_turns=8)
        assert results[-1].components["solved"] == score(responses[: len(results)], row)


@settings(max_examples=300, deadline=None)
@given(content=FREE)
def test_a_response_is_a_move_for_both_or_for_none(content, make_row, play, score):
    """The game has one move, so that no move hides another one."""
    for truth in ({"game": "maze", "grid": ["SG"]}, {"game": "mastermind", "code": "7", "symbols": "72"}):
        row = make_row(truth)
        assert play(row, [content])[0].components["solved"] == score([content], row)


def test_the_score_does_not_depend_on_the_reward(truths, make_row, score):
    row = make_row(truths["maze"])
    claimed = Trajectory("row", "group", 0)
    assert FAMILY.score(claimed, row) == 0.0
    assert score(["<move>east</move>"], row) == 0.0


def test_moves_of_other_roles_are_ignored(truths, make_row):
    row = make_row(truths["mastermind"])

    messages = [{"role": "user", "content": "<move>725</move>"}, {"role": "assistant", "content": None}]
    assert FAMILY.score(SimpleNamespace(messages=messages), row) == 0.0


@pytest.mark.parametrize(
    "response", ["<move>527</move>", "<move>7255</move>", "725", "<move>725</move><move>725</move>"]
)
def test_similar_codes_score_zero(response, truths, make_row, score):
    assert score([response], make_row(truths["mastermind"])) == 0.0


def test_a_walk_stops_at_walls_and_edges(make_row, score):
    row = make_row({"game": "maze", "grid": ["S.", "#G"]})
    moves = [f"<move>{name}</move>" for name in ("south", "west", "north", "east", "east", "south")]
    assert score(moves, row) == 1.0 and score(moves[:-1], row) == 0.0
