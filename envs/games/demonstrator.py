"""Weak players for the warm start of the tiny policy.

They show how every move is made, but their habit is to repeat their first move, whatever they see: a policy cloned
from them mostly fails, greedy or sampled. What reinforcement learning adds is to heed what is seen. The shares below
set that starting point.
"""

from __future__ import annotations

import random

from envs.games.environment import make_game
from envs.games.mastermind import DIGITS, Mastermind
from envs.games.maze import STEPS, Maze
from mtrl.environments.family import Demonstrator
from mtrl.types import Row

STUBBORN = 0.58
"""Share of episodes that repeat the first move."""
GUESS_SLIPS = 0.03
"""Share of the digits that any other episode guesses at random, impossible ones too."""
STEP_SLIPS = 0.2
"""Share of the steps that any other episode takes anywhere, into walls too."""


class WeakBreaker:
    """Plays one episode of mastermind: begins with the first digit in all places, then perhaps goes on to the next."""

    def __init__(self, game: Mastermind, rng: random.Random):
        self.game, self.rng = game, rng
        self.stubborn = rng.random() < STUBBORN
        self.guess = game.symbols[0] * len(game.code)
        self.marked = False

    def act(self, observation: str | None) -> str:
        """The next response."""
        goes_on = self.marked and not self.stubborn
        wanted = "".join(map(self._next, self.guess, self.game.code)) if goes_on else self.guess
        said = wanted if self.stubborn else "".join(map(self._slip, wanted))
        self.marked = set(said) <= set(self.game.symbols)
        self.guess = said if self.marked else wanted  # what was no guess is said again, without the slip
        return f"<move>{said}</move>"

    def _next(self, digit: str, right: str) -> str:
        """A digit that is marked right stays; for any other comes the one that is shown after it."""
        symbols = self.game.symbols
        return digit if digit == right else symbols[(symbols.index(digit) + 1) % len(symbols)]

    def _slip(self, digit: str) -> str:
        return self.rng.choice(DIGITS) if self.rng.random() < GUESS_SLIPS else digit


class WeakWalker:
    """Plays one episode of a maze."""

    def __init__(self, maze: Maze, rng: random.Random):
        self.maze, self.rng = maze, rng
        self.habit = maze.ways()[0] if rng.random() < STUBBORN else None

    def act(self, observation: str | None) -> str:
        """The next response. The space makes the direction the same token as in observations."""
        direction = self._direction()
        self.maze.play(direction)
        return f"<move> {direction}</move>"

    def _direction(self) -> str:
        if self.habit is not None:
            return self.habit
        if self.rng.random() < STEP_SLIPS:
            return self.rng.choice(list(STEPS))
        return self.rng.choice(self.maze.nearer())


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """A weak player of `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    game = make_game(row["ground_truth"])
    return WeakBreaker(game, rng) if isinstance(game, Mastermind) else WeakWalker(game, rng)
