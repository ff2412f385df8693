"""Rows of the games family: generated games."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from typing import Any

from envs.games import mastermind, maze
from envs.games.environment import make_game
from envs.games.mastermind import Mastermind
from envs.games.prompts import EXAMPLE_ROWS
from envs.games.prompts import prompt as prompt_of
from mtrl.datasets import Splits, cap
from mtrl.environments.config_values import check_count
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

HELD_OUT = 8
"""Number of games of which one is held out, on average."""
MOST_MISSES = 2000
"""Maximum number of consecutive draws without a new game, after which the games count as exhausted."""
Draw = Callable[[random.Random], dict[str, Any]]
"""Function that draws the `ground_truth` of a row."""


def load(
    data: Any,
    seed: int,
    game: str = "both",
    places: int = 3,
    symbols: int = 4,
    size: int = 4,
    steps: int = maze.LONGEST,
    prompt: str = "short",
) -> Splits:
    """Generate the rows.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated games.
        game: mastermind, maze, or both in turn.
        places: number of places of mastermind's code, up to 5.
        symbols: number of digits that the code may consist of, up to 10.
        size: side length of the maze's square grid, in cells.
        steps: maximum number of steps from start to goal.
        prompt: full, with rules and a worked example for a language model, or short.

    Raises:
        UserError: a value is out of range, there are too few different games to hold some out, or `data.path` is set.
    """
    if data.path is not None:
        raise UserError(f"data.path={data.path} is not read by games, which are generated; set data.path=null")
    check_count("symbols", symbols, 2, 10)
    check_count("places", places, 1, 5)
    check_count("size", size, 3, 9)
    check_count("steps", steps, maze.SHORTEST, 40)
    draws: dict[str, Draw] = {
        "mastermind": partial(mastermind.draw, places=places, symbols=symbols),
        "maze": partial(maze.draw, size=size, steps=steps),
    }
    if game not in (*draws, "both"):
        raise UserError(f"environment.config.game={game} is not known; choose one of {', '.join(draws)}, both")
    chosen = draws if game == "both" else {game: draws[game]}
    return cap(_generated(data, seed, chosen, prompt == "full"), data)


def gold(row: Row) -> list[str]:
    """Return the responses of a good player, which breaks codes from the observed marks, and walks the shortest way."""
    game = make_game(row["ground_truth"])
    moves = mastermind.solve(game) if isinstance(game, Mastermind) else maze.solve(game)
    return [f"<move>{move}</move>" for move in moves]


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of the row's full prompt solves."""
    return EXAMPLE_ROWS[row["ground_truth"]["game"]]


def decoys(row: Row) -> list[str]:
    """Return well-formed moves that end no game: other codes of the same digits, other directions than the last
    step."""
    game = make_game(row["ground_truth"])
    if isinstance(game, Mastermind):
        moves = [code for code in mastermind.consistent(len(game.code), game.symbols, []) if code != game.code]
    else:
        last = maze.solve(game)[-1]
        moves = [name for name in maze.STEPS if name != last]
    return [f"<move>{move}</move>" for move in moves]


def is_held_out(key: str) -> bool:
    """Whether the game belongs to the test split. This depends only on the game, not on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def _generated(data: Any, seed: int, draws: dict[str, Draw], full: bool) -> Splits:
    rows = {}
    for split, count in (("train", data.synthetic_train_rows), ("test", data.synthetic_test_rows)):
        share = -(-count // len(draws))
        games = [_games(draw, random.Random(f"games/{seed}/{name}"), split, share) for name, draw in draws.items()]
        truths = [truth for turn in zip_longest(*games) for truth in turn if truth is not None][:count]
        if len(truths) < count:
            log.warning("games: %d different held-out games instead of %d: there are no more", len(truths), count)
        rows[split] = [_row(f"{split}-{index}", split, truth, full) for index, truth in enumerate(truths)]
    return Splits(**rows)


def _games(draw: Draw, rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    """Draw `count` games of a split. Held-out games are distinct, so there may be fewer of them."""
    games: list[dict[str, Any]] = []
    seen: set[str] = set()
    misses = 0
    while len(games) < count and misses < MOST_MISSES:
        truth = draw(rng)
        misses += 1
        if is_held_out(_key(truth)) == (split == "test") and _key(truth) not in seen:
            games.append(truth)
            misses = 0
            if split == "test":
                seen.add(_key(truth))
    if count and not games:
        raise UserError(
            f"environment.config leaves no {split} rows of {truth['game']}: it has too few different games; "
            "raise environment.config.places, symbols or size"
        )
    return games


def _key(truth: dict[str, Any]) -> str:
    """Return a key that identifies the game."""
    return " ".join(truth["grid"]) if truth["game"] == "maze" else f"{truth['code']} from {truth['symbols']}"


def _row(row_id: str, split: str, truth: dict[str, Any], full: bool) -> Row:
    return {
        "id": row_id,
        "prompt": prompt_of(truth["game"], make_game(truth).opening, full),
        "ground_truth": truth,
        "split": split,
        "key": _key(truth),
    }
