"""Rows of the games: complete, solvable, with disjoint splits."""

import json
from collections import Counter
from itertools import product

import pytest

from envs.games import FAMILY
from envs.games.data import is_held_out
from envs.games.environment import make_game
from envs.games.maze import Maze
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError


def test_rows_are_complete_and_json(splits):
    assert len(splits.train) == 4096
    assert json.loads(json.dumps(splits.train)) == splits.train
    assert len({row["key"] for row in splits.test}) == len(splits.test), "twice would count too much"
    ids = [row["id"] for row in splits.train + splits.test]
    assert len(set(ids)) == len(ids)
    assert Counter(row["ground_truth"]["game"] for row in splits.test) == {"mastermind": 83, "maze": 128}
    for row in splits.train[:200]:
        assert row["prompt"] == [{"role": "user", "content": make_game(row["ground_truth"]).opening}]


def test_splits_share_no_game_whatever_the_seed(splits):
    others = [FAMILY.load(DataConfig(max_test_rows=None), seed=seed) for seed in (1, 2)]
    train = {row["key"] for each in (splits, *others) for row in each.train}
    test = {row["key"] for each in (splits, *others) for row in each.test}
    assert not train & test and len(train) > 2000
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))


def test_the_key_is_the_whole_game(splits):
    for row in splits.train:
        truth = row["ground_truth"]
        key = " ".join(truth["grid"]) if truth["game"] == "maze" else f"{truth['code']} from {truth['symbols']}"
        assert row["key"] == key


def test_mazes_hold_nothing_that_cannot_be_reached(splits):
    """Otherwise two rows with different keys could be the same maze."""
    for row in splits.train[1::2]:
        grid = row["ground_truth"]["grid"]
        maze = Maze(grid)
        assert maze.distances.keys() == maze.cells.keys()
        columns = ["".join(line[x] for line in grid) for x in range(len(grid[0]))]
        assert all(set(edge) != {"#"} for edge in (grid[0], grid[-1], columns[0], columns[-1]))


def test_generation_is_a_function_of_the_seed(splits):
    assert FAMILY.load(DataConfig(max_test_rows=None), seed=0) == splits
    assert FAMILY.load(DataConfig(), seed=1).train != splits.train


@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_is_rewarded_and_scored_one(splits, split, play, score):
    lengths = Counter()
    for row in getattr(splits, split)[:400]:
        responses = FAMILY.gold(row)
        results = play(row, responses, max_turns=6)
        assert len(results) == len(responses) and results[-1].reward == score(responses, row) == 1.0
        lengths[len(responses)] += 1
    assert max(lengths) <= 4, "six turns are half as many again as one needs"


def test_decoys_look_right_and_are_wrong(splits, play, score):
    for row in splits.test[:50]:
        *before, last = FAMILY.gold(row)
        decoys = FAMILY.decoys(row)
        assert len(decoys) >= 3 and last not in decoys
        for decoy in decoys:
            results = play(row, [*before, decoy])
            assert score([*before, decoy], row) == results[-1].reward == 0.0
            assert results[-1].metrics["malformed"] == 0.0


def test_the_prompt_does_not_reveal_the_solution(splits):
    """Several games, of both splits, have the same opening."""
    for games in (splits.train[::2], splits.train[1::2]):
        by_prompt = {}
        for row in games:
            by_prompt.setdefault(row["prompt"][0]["content"], set()).add(row["key"])
        assert sum(len(keys) for keys in by_prompt.values()) > 4 * len(by_prompt)


def test_full_prompts_contain_the_rules():
    config = {"prompt": "full", "places": 4, "symbols": 6, "size": 6, "steps": 6}
    mastermind, maze = FAMILY.load(DataConfig(synthetic_train_rows=2, synthetic_test_rows=2), 0, **config).train
    assert [[message["role"] for message in row["prompt"]] for row in (mastermind, maze)] == [["system", "user"]] * 2
    assert "Mastermind" in mastermind["prompt"][0]["content"] and "maze" in maze["prompt"][0]["content"]
    assert mastermind["prompt"][1]["content"].startswith("code of 4 from ")
    assert len(maze["ground_truth"]["grid"]) > 2


@pytest.mark.parametrize(
    "config", [{"places": 3, "symbols": 3, "size": 3, "steps": 3}, {"places": 5, "symbols": 10, "size": 9, "steps": 40}]
)
def test_small_and_large_games_have_rows_on_both_sides(config):
    splits = FAMILY.load(DataConfig(synthetic_train_rows=20, synthetic_test_rows=20), 0, **config)
    assert len(splits.train) == len(splits.test) == 20


def test_fewer_held_out_games_than_requested_are_logged(caplog):
    splits = FAMILY.load(DataConfig(), 0, game="mastermind", places=2, symbols=3)
    assert 0 < len(splits.test) < 60 and len({row["key"] for row in splits.test}) == len(splits.test)
    assert f"{len(splits.test)} different held-out games instead of 256" in caplog.text
    assert len(splits.train) == 4096


@pytest.mark.parametrize("game", ["mastermind", "maze"])
def test_one_game_alone(game):
    splits = FAMILY.load(DataConfig(synthetic_train_rows=20, synthetic_test_rows=20, max_test_rows=5), 0, game=game)
    assert {row["ground_truth"]["game"] for row in splits.train + splits.test} == {game}
    assert (len(splits.train), len(splits.test)) == (20, 5)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"game": "chess"}, "environment.config.game=chess is not known; choose one of mastermind, maze, both"),
        ({"symbols": 11}, "environment.config.symbols=11 must be a whole number from 2 to 10"),
        ({"places": 6}, "environment.config.places=6 must be a whole number from 1 to 5"),
        ({"places": True}, "environment.config.places=True must be"),
        ({"size": 2}, "environment.config.size=2 must be a whole number from 3 to 9"),
        ({"steps": 2}, "environment.config.steps=2 must be a whole number from 3 to 40"),
    ],
)
def test_invalid_games_are_refused(config, sentence):
    with pytest.raises(UserError, match=sentence):
        FAMILY.load(DataConfig(), 0, **config)


def test_no_setting_hangs():
    """A small number of different games is refused or returned; the search for more ends."""
    for places, symbols in product(range(1, 4), range(2, 11)):
        try:
            FAMILY.load(DataConfig(synthetic_train_rows=5, synthetic_test_rows=5), 0, places=places, symbols=symbols)
        except UserError as error:
            assert "too few different games" in str(error) and places == 1


def test_rows_of_a_file_are_refused():
    with pytest.raises(UserError, match="data.path=rows.jsonl is not read by games"):
        FAMILY.load(DataConfig(path="rows.jsonl"), 0)
