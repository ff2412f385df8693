"""The rules of the games, and their solvability."""

from itertools import product

import pytest

from envs.games.environment import make_game
from envs.games.mastermind import Mastermind, marks, solve
from envs.games.maze import Maze
from envs.games.maze import solve as walk
from mtrl.errors import UserError


@pytest.mark.parametrize(
    ("guess", "code", "seen"),
    [
        ("725", "725", "+++"),
        ("572", "725", "~~~"),
        ("789", "725", "+--"),
        ("777", "725", "+~~"),
        ("275", "725", "~~+"),
        ("88", "72", "--"),
        ("727", "772", "+~~"),
        ("222", "772", "~~+"),
    ],
)
def test_marks(guess, code, seen):
    assert marks(guess, code) == seen


def test_a_guess_is_marked_place_by_place(truths):
    game = Mastermind.from_truth(truths["mastermind"])
    assert game.opening == "code of 3 from 25789"
    assert [(o.observation, o.progress) for o in map(game.play, ["789", "2, 7,\t5", "725"])] == [
        ("+--", 1 / 3),
        ("~~+", 1 / 3),
        ("+++", 1.0),
    ]


@pytest.mark.parametrize(
    "move", ["", "72", "7258", "72a", "721", "７２５", "-725", "7.25", "7 2 5\0", "7\xa025", "٧٢٥"]
)
def test_invalid_guesses(truths, move):
    assert Mastermind.from_truth(truths["mastermind"]).play(move) is None


def test_gold_breaks_every_code_within_four_guesses():
    """An episode has six turns, half as many again as needed."""
    longest = max(len(solve(Mastermind("".join(code), "8901"))) for code in product("8901", repeat=3))
    assert longest <= 4


def test_a_walk(truths):
    maze = Maze.from_truth(truths["maze"])
    assert maze.opening == "maze ; open north east ; goal 1 north 3 east"
    seen = [maze.play(move).observation for move in ("west", "East", " south ", "east")]
    assert seen == [
        "wall ; open north east ; goal 1 north 3 east",
        "open north south west ; goal 1 north 2 east",
        "open north east ; goal 2 north 2 east",
        "open east west ; goal 2 north 1 east",
    ]
    assert [maze.play(move).progress for move in ("east", "north", "north")] == pytest.approx([4 / 6, 5 / 6, 1.0])


def test_going_away_is_no_progress_and_never_negative():
    maze = Maze(["....", ".S.G"])
    assert [maze.play(move).progress for move in ("west", "north", "south", "east", "east")] == [0, 0, 0, 0, 0.5]


@pytest.mark.parametrize(
    "move", ["", "up", "northeast", "north east", "n", "ｎｏｒｔｈ", "ſouth", "north\0", "north\xa0"]
)
def test_invalid_steps(truths, move):
    maze = Maze.from_truth(truths["maze"])
    assert maze.play(move) is None and maze.view() == Maze.from_truth(truths["maze"]).view()


def test_the_shortest_way_is_walked(truths):
    assert walk(Maze.from_truth(truths["maze"])) == ["east", "south", "east", "east", "north", "north"]


@pytest.mark.parametrize(
    ("truth", "sentence"),
    [
        ({}, "ground_truth.game=None is not known; choose one of mastermind, maze"),
        ({"game": "chess"}, "ground_truth.game='chess' is not known"),
        ({"game": "mastermind"}, "is no mastermind row"),
        ({"game": "mastermind", "code": "1a", "symbols": "1a"}, "is no mastermind row"),
        ({"game": "mastermind", "code": "13", "symbols": "12"}, "is no mastermind row"),
        ({"game": "mastermind", "code": "", "symbols": "12"}, "is no mastermind row"),
        ({"game": "mastermind", "code": 12, "symbols": 12}, "is no mastermind row"),
        ({"game": "maze"}, "is no maze row"),
        ({"game": "maze", "grid": "S.G"}, "is no maze row"),
        ({"game": "maze", "grid": ["S#G"]}, "is no maze row"),
        ({"game": "maze", "grid": ["S.GG"]}, "is no maze row"),
        ({"game": "maze", "grid": ["S.?G"]}, "is no maze row"),
        ({"game": "maze", "grid": [3]}, "is no maze row"),
    ],
)
def test_unsolvable_rows_are_refused(truth, sentence):
    with pytest.raises(UserError, match=sentence):
        make_game(truth)
