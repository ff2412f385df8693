"""A weak demonstrator for the warm start of the tiny policy.

In half of its episodes it repeats one direction, whatever the picture shows; in the others it walks a shortest way, but
takes a fifth of its steps in a random direction. Reinforcement learning then teaches the policy to look at pictures.
"""

from __future__ import annotations

import random

from envs.visual_maze.maze import STEPS, Maze
from mtrl.environments.family import Demonstrator
from mtrl.types import Row

STUBBORN = 0.5
"""Share of episodes that repeat the first step."""
SLIPS = 0.2
"""Share of steps, in the other episodes, in a random direction."""


class WeakWalker:
    """Runs one episode."""

    def __init__(self, maze: Maze, rng: random.Random):
        self.maze, self.rng = maze, rng
        self.habit = rng.choice(list(STEPS)) if rng.random() < STUBBORN else None

    def act(self, observation: str | None) -> str:
        """Return the next response."""
        direction = self.habit or self._direction()
        self.maze.go(direction)
        return f"<move>{direction}</move>"

    def _direction(self) -> str:
        if self.rng.random() < SLIPS:
            return self.rng.choice(list(STEPS))
        return self.rng.choice(self.maze.nearer())


def demonstrate(row: Row, rng: random.Random) -> Demonstrator:
    """Return a weak demonstrator for `row`, which must be a training row."""
    if row.get("split") == "test":
        raise ValueError(f"row {row['id']} is held out and must not be demonstrated")
    return WeakWalker(Maze.from_truth(row["ground_truth"]), rng)
