"""Tic-tac-toe: the rules, the fixed opponent, and a scorer that agrees with the reward in random games."""

import random
from itertools import product

import pytest

from envs.tic_tac_toe import board
from envs.tic_tac_toe.environment import TicTacToeEnv, parse_move
from mtrl.config.schema import DataConfig
from mtrl.environments.family import get_family
from mtrl.errors import UserError
from mtrl.types import FinishReason, StopReason, Trajectory, Turn

FAMILY = get_family("tic_tac_toe")


@pytest.fixture(scope="module")
def splits():
    return FAMILY.load(DataConfig(synthetic_train_rows=60, synthetic_test_rows=20), 0)


def played(row, act):
    """Return the trajectory of the row's role against the fixed opponent; `act(observation)` returns a response."""
    environment, turns, observation, is_over = TicTacToeEnv(), [], None, False
    seen = environment.reset(row)
    while not is_over:
        text = act(observation)
        result = environment.step(text, row["ground_truth"])
        message = {"role": "assistant", "content": text}
        turns.append(
            Turn([], [1], [0.0], [(0, 1)], FinishReason.STOP, text, message, observation=seen, reward=result.reward)
        )
        observation, is_over = result.observation, result.done
        seen = [{"role": "user", "content": observation}]
    return Trajectory("t", "g", 0, turns, StopReason.DONE, seen)


def test_reward_and_both_ways_of_scoring_agree_in_weak_games(splits):
    """The scorer replays the game by the row, or reads the boards as in self-play."""
    outcomes = set()
    for row, seed in product(splits.train, range(4)):
        trajectory = played(row, FAMILY.demonstrate(row, random.Random(seed)).act)
        won = float(trajectory.reward == 1.0)
        assert FAMILY.score(trajectory, row) == won
        trajectory.role = row["role"]
        assert FAMILY.score(trajectory, row) == won
        outcomes.add((row["role"], trajectory.reward))
    assert outcomes == set(product("xo", (-1.0, 0.0, 1.0)))


def test_gold_wins_every_row_and_the_splits_are_apart(splits):
    for row in splits.train + splits.test:
        responses = iter(FAMILY.gold(row))
        assert played(row, lambda observation, responses=responses: next(responses)).reward == 1.0
        assert next(responses, None) is None
    assert not {row["key"] for row in splits.train} & {row["key"] for row in splits.test}
    with pytest.raises(ValueError, match="is held out"):
        FAMILY.demonstrate(splits.test[0], random.Random(0))


def test_more_rows_than_there_are_games_end_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("envs.tic_tac_toe.data.MOST_MISSES", 16)
    rows = FAMILY.load(DataConfig(synthetic_train_rows=0, synthetic_test_rows=10**6), 0).test
    assert 0 < len({row["key"] for row in rows}) == len(rows)
    assert "different test games instead of 1000000: there are no more" in caplog.text


def test_an_invalid_move_loses_and_the_other_role_wins(splits):
    for response in ("<move>1</move>", "5", "<move>0</move>", "<move>2</move><move>3</move>", "<move>x</move>"):
        environment = TicTacToeEnv()
        environment.deal(splits.train[0])
        environment.act("x", "<move>1</move>")
        environment.act("o", response)
        assert environment.mover is None
        x, o = environment.result("x"), environment.result("o")
        assert (x.reward, o.reward, x.metrics, o.metrics) == (1.0, -1.0, {"invalid": 0.0}, {"invalid": 1.0})
        assert x.done and o.done and x.observation == "+23/456/789 ; the other player made no valid move"


def test_the_fixed_opponent_completes_a_line_and_else_follows_its_order():
    assert board.reply("oo.xx....", "o", "987654321") == "3"
    assert board.reply("oo.xx....", "x", "987654321") == "6"
    assert board.reply("o........", "x", "198765432") == "9"
    assert board.view("oo.xx....", "x") == "--3/++6/789"


def test_thinking_is_ignored():
    assert parse_move("<think><move>1</move></think> <move> 2 </move>") == "2"
    assert parse_move("<move>\x1d2</move>") == "2"


def test_the_scorer_of_self_play_sees_a_forfeit():
    def judged(final, *moves):
        texts = [f"<move>{cell}</move>" for cell in moves]
        boards = ("123/456/789", "+23/4-6/789", "++3/4-6/78-")
        turns = [
            Turn(
                [],
                [],
                [],
                [],
                FinishReason.STOP,
                text,
                {"role": "assistant", "content": text},
                observation=[{"role": "user", "content": seen}],
            )
            for text, seen in zip(texts, boards, strict=False)
        ]
        final = [{"role": "user", "content": final}]
        return FAMILY.score(Trajectory("t", "g", 0, turns, StopReason.DONE, final, role="x"), {})

    gave_up = "; the other player made no valid move"
    assert judged("+++/4-6/78-", 1, 2, 3) == 1.0
    assert judged("+++/4-6/78-", 1, 2, "\x1d3") == 1.0, "int() alone refuses this space, which a policy sampled"
    assert judged("++3/4-6/78-", 1, 2, 5) == 0.0
    assert judged(f"++3/4-6/789 {gave_up}", 1, 2) == 1.0
    assert judged(f"+23/456/789 {gave_up}", 5, 5) == 0.0
    assert FAMILY.score(Trajectory("t", "g", 0, role="o"), {}) == 0.0


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="generator.max_turns=3 ends a game before the board is full; set it to 5"):
        TicTacToeEnv(3)
    with pytest.raises(UserError, match=r"data.path=games.jsonl is not read by tic_tac_toe, .*; set data.path=null"):
        FAMILY.load(DataConfig(path="games.jsonl"), 0)
    with pytest.raises(UserError, match="row r has the role 'z'; it must be one of x, o"):
        TicTacToeEnv().reset({"id": "r", "role": "z"})
