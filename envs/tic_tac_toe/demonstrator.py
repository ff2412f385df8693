"""A weak demonstrator for the warm start of the tiny policy: it takes free cells at random, completes only some of its
lines, and sometimes takes a cell that is not free. Reinforcement learning then teaches the policy to look at the
board."""

from __future__ import annotations

import random
import re

from envs.tic_tac_toe import board
from mtrl.environments.family import Demonstrator
from mtrl.types import Row

SLIPS = 0.05
"""Share of moves that may go to any cell."""
COMPLETES = 0.5
"""Share of the other moves that complete a line where that is possible."""


class WeakPlayer:
    """Runs one game."""

    def __init__(self, opening: str, rng: random.Random):
        self.opening, self.rng = opening, rng

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        return f"<move>{self._cell(observation or self.opening)}</move>"

    def _cell(self, seen: str) -> str:
        if self.rng.random() < SLIPS:
            return self.rng.choice("123456789")
        state = re.sub("[1-9]", ".", seen.replace("/", "").translate(str.maketrans("+-", "xo")))
        winning = [cell for cell in board.free(state) if board.wins(board.placed(state, cell, "x"), "x")]
        if winning and self.rng.random() < COMPLETES:
            return self.rng.choice(winning)
        return self.rng.choice(board.free(state))


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    return WeakPlayer(row["prompt"][-1]["content"], rng)
