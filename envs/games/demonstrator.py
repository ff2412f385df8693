"""Weak demonstrators for the warm start of the tiny policy.

They demonstrate every kind of move, but usually repeat their first move and ignore the observations: a policy cloned
from them mostly fails, greedy or sampled. Reinforcement learning then teaches the policy to use the observations. The
shares below set that starting point.
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
"""Share of digits, in the other episodes, that are guessed at random, including impossible digits."""
STEP_SLIPS = 0.2
"""Share of steps, in the other episodes, that go in a random direction, including into walls."""


class WeakBreaker:
    """Runs one episode of mastermind: starts with the first digit in all places, then may advance to the next
    digits."""

    def __init__(self, game: Mastermind, rng: random.Random):
        self.game, self.rng = game, rng
        self.stubborn = rng.random() < STUBBORN
        self.guess = game.symbols[0] * len(game.code)
        self.marked = False

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        goes_on = self.marked and not self.stubborn
        wanted = "".join(map(self._next, self.guess, self.game.code)) if goes_on else self.guess
        guess = wanted if self.stubborn else "".join(map(self._slip, wanted))
        self.marked = set(guess) <= set(self.game.symbols)
        self.guess = guess if self.marked else wanted  # an invalid guess is repeated without the slip
        return f"<move>{guess}</move>"

    def _next(self, digit: str, right: str) -> str:
        """Return the digit if it is marked right, or else the digit that follows it in the list of symbols."""
        symbols = self.game.symbols
        return digit if digit == right else symbols[(symbols.index(digit) + 1) % len(symbols)]

    def _slip(self, digit: str) -> str:
        return self.rng.choice(DIGITS) if self.rng.random() < GUESS_SLIPS else digit


class WeakWalker:
    """Runs one episode of a maze."""

    def __init__(self, maze: Maze, rng: random.Random):
        self.maze, self.rng = maze, rng
        self.habit = maze.ways()[0] if rng.random() < STUBBORN else None

    def act(self, observation: str | None) -> str:
        """Return the next response. The space makes the direction the same token as in observations."""
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
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    game = make_game(row["ground_truth"])
    return WeakBreaker(game, rng) if isinstance(game, Mastermind) else WeakWalker(game, rng)
