"""Rows of the tic-tac-toe family: a role, and the order in which the fixed opponent prefers the cells."""

from __future__ import annotations

import logging
import random
from hashlib import sha256
from typing import Any

from envs.tic_tac_toe import board
from envs.tic_tac_toe.prompts import EXAMPLE_ROW
from envs.tic_tac_toe.prompts import prompt as prompt_of
from mtrl.datasets import Splits, cap
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

HELD_OUT = 8
"""Number of games of which one is held out, on average."""
MOST_MISSES = 2000
"""Maximum number of consecutive draws without a new game, after which the games count as exhausted."""


def load(data: Any, seed: int, prompt: str = "short") -> Splits:
    """Generate the rows; the roles alternate.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated games.
        prompt: full, with rules and a worked example for a language model, or short.

    Raises:
        UserError: `data.path` is set.
    """
    if data.path is not None:
        raise UserError(f"data.path={data.path} is not read by tic_tac_toe, which is generated; set data.path=null")
    counts = {"train": data.synthetic_train_rows, "test": data.synthetic_test_rows}
    rows = {split: _rows(split, count, seed, prompt == "full") for split, count in counts.items()}
    return cap(Splits(**rows), data)


def gold(row: Row) -> list[str]:
    """Return the responses of a player that knows the fixed opponent's moves in advance and wins."""
    moves = _winning(_opened(row["ground_truth"]), **row["ground_truth"])
    assert moves is not None, f"row {row['id']} cannot be won"
    return [f"<move>{move}</move>" for move in moves]


def decoys(row: Row) -> list[str]:
    """Return well-formed moves other than the last one of `gold`."""
    return [move for cell in board.free(board.EMPTY) if (move := f"<move>{cell}</move>") != gold(row)[-1]]


def worked_example(row: Row) -> Row:
    """Return the row that the worked example of the full prompt solves."""
    return EXAMPLE_ROW


def is_held_out(key: str) -> bool:
    """Whether the game belongs to the test split. This depends only on the game, not on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def _rows(split: str, count: int, seed: int, full: bool) -> list[Row]:
    rng, rows, seen = random.Random(f"tic_tac_toe/{seed}/{split}"), [], {_key(**EXAMPLE_ROW["ground_truth"])}
    misses = 0
    while len(rows) < count and misses < MOST_MISSES:
        role, order = "xo"[len(rows) % 2], "".join(rng.sample("123456789", 9))
        truth, key = {"role": role, "order": order}, _key(role, order)
        misses += 1
        if key in seen or is_held_out(key) != (split == "test") or _winning(_opened(truth), role, order) is None:
            continue
        misses = 0
        seen.add(key)
        text = prompt_of(board.view(_opened(truth), role), full)
        rows.append(
            {
                "id": f"{split}-{len(rows)}",
                "prompt": text,
                "role": role,
                "ground_truth": truth,
                "split": split,
                "key": key,
            }
        )
    if len(rows) < count:
        log.warning("tic_tac_toe: %d different %s games instead of %d: there are no more", len(rows), split, count)
    return rows


def _key(role: str, order: str) -> str:
    """Return a key that identifies the game."""
    return f"{role} against {order}"


def _opened(truth: dict[str, str]) -> str:
    """Return the board before the first move of the row's role."""
    if truth["role"] == "x":
        return board.EMPTY
    return board.placed(board.EMPTY, board.reply(board.EMPTY, "x", truth["order"]), "x")


def _winning(state: str, role: str, order: str) -> list[str] | None:
    """Return the first shortest series of moves with which the role wins against the fixed opponent; None if there is
    none."""
    found = (_winning_within(moves, state, role, order) for moves in range(1, 6))
    return next((series for series in found if series is not None), None)


def _winning_within(moves: int, state: str, role: str, order: str) -> list[str] | None:
    """Return the first series of at most `moves` moves that wins. It is a shortest one if fewer moves cannot win."""
    for cell in board.free(state):
        mine = board.placed(state, cell, role)
        if board.wins(mine, role):
            return [cell]
        if moves == 1 or "." not in mine:
            continue
        theirs = board.placed(mine, board.reply(mine, board.OTHER[role], order), board.OTHER[role])
        if board.is_over(theirs):
            continue
        rest = _winning_within(moves - 1, theirs, role, order)
        if rest is not None:
            return [cell, *rest]
    return None
