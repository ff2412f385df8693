"""Rewards of the games: an exhaustive search over all moves of a policy."""

import copy
from itertools import product

import pytest

from envs.games import FAMILY
from envs.games.reward import SCHEMES
from mtrl.errors import UserError

MAX_TURNS = 8
MAZES = [["..#G", "S.#.", "#..."], ["S...", ".##.", "...G"], [".S..#", ".#.#.", "...#.", "#G..."]]
TRUTHS = [
    {"game": "mastermind", "code": "725", "symbols": "25789"},
    {"game": "mastermind", "code": "21", "symbols": "123"},
    *({"game": "maze", "grid": grid} for grid in MAZES),
]


def moves_of(truth):
    if truth["game"] == "mastermind":
        return [
            "<move>none</move>",
            *(f"<move>{''.join(g)}</move>" for g in product(truth["symbols"], repeat=len(truth["code"]))),
        ]
    return ["nothing", *(f"<move>{name}</move>" for name in ("north", "east", "south", "west"))]


def state_of(environment):
    """The state of the environment that determines its further behaviour, except for the constant row."""
    here = getattr(environment.game, "here", None)
    return environment.current_turn, here, environment.reward.granted


def extremes(truth, scheme, max_turns=MAX_TURNS):
    """The rewards of all sequences of moves: (maximum if solved, minimum if solved, maximum if not solved)."""
    moves = moves_of(truth)
    known = {}

    def search(environment):
        key = state_of(environment)
        if key not in known:
            known[key] = [outcome for move in moves for outcome in after(environment, move)]
            solved = [earned for earned, won in known[key] if won]
            unsolved = [earned for earned, won in known[key] if not won]
            known[key] = [(e, True) for e in {max(solved), min(solved)}] if solved else []
            known[key] += [(e, False) for e in {max(unsolved), min(unsolved)}] if unsolved else []
        return known[key]

    def after(environment, move):
        environment = copy.deepcopy(environment)
        result = environment.step(move, truth)
        if result.done:
            return [(result.reward, not result.truncated)]
        return [(result.reward + rest, won) for rest, won in search(environment)]

    environment = FAMILY.environment(max_turns=max_turns, reward=scheme)
    environment.reset({"ground_truth": truth})
    outcomes = search(environment)
    solved = [earned for earned, won in outcomes if won]
    return max(solved), min(solved), max(earned for earned, won in outcomes if not won)


def at_once(truth, scheme, play, make_row):
    """The reward of the shortest solution."""
    row = make_row(truth)
    shortest = [f"<move>{truth['code']}</move>"] if truth["game"] == "mastermind" else FAMILY.gold(row)
    return sum(result.reward for result in play(row, shortest, max_turns=MAX_TURNS, reward=scheme))


@pytest.mark.parametrize("scheme", ["default", "progress"])
@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_nothing_earns_more_than_solving_at_once(truth, scheme, play, make_row):
    best, worst_solved, best_unsolved = extremes(truth, scheme)
    assert best == pytest.approx(at_once(truth, scheme, play, make_row), abs=1e-9) == 1.0
    assert worst_solved == pytest.approx(1.0, abs=1e-9)
    assert best_unsolved <= (0.0 if scheme == "default" else 0.2)


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
def test_the_guides_rule_rewards_waiting(truth, play, make_row):
    """The scheme is not the default for this reason. The test also proves that the search finds a stalling policy."""
    best, *_ = extremes(truth, "guide")
    assert best > at_once(truth, "guide", play, make_row) + 0.1


def test_the_guides_rule_by_hand(play, make_row, truths):
    moves = ["<move>789</move>", "<move>?</move>", "<move>728</move>", "<move>728</move>"]
    results = play(make_row(truths["mastermind"]), moves, max_turns=4, reward="guide")
    assert [result.reward for result in results] == pytest.approx([0.1 / 3, 0.0, 0.2 / 3, 2 / 3])


def test_progress_is_rewarded_once(play, make_row, truths):
    moves = [f"<move>{guess}</move>" for guess in ("789", "789", "728", "829", "725")]
    results = play(make_row(truths["mastermind"]), moves, reward="progress")
    assert [result.reward for result in results] == pytest.approx([0.2 / 3, 0.0, 0.2 / 3, 0.0, 1 - 0.4 / 3])
    assert all(result.reward == sum(result.components.values()) for result in results)


@pytest.mark.parametrize("turns", range(1, MAX_TURNS + 1))
def test_a_solved_game_is_worth_one_in_whichever_turn(play, make_row, truths, turns):
    moves = ["<move>222</move>"] * (turns - 1) + ["<move>725</move>"]
    results = play(make_row(truths["mastermind"]), moves, max_turns=MAX_TURNS)
    assert [result.reward for result in results] == [0.0] * (turns - 1) + [1.0]


def test_an_unknown_scheme():
    with pytest.raises(
        UserError, match="reward.scheme=skyrl is not known to games; choose one of default, progress, guide"
    ):
        FAMILY.environment(reward="skyrl")
    assert FAMILY.environment.reward_schemes == SCHEMES
