"""The maze: a walk on a grid, and its picture."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrl.errors import UserError

STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
"""Change of (line, column) by direction."""
BLOCKED_SHARE = 0.35
SHORTEST = 2
"""Minimum number of steps from start to goal."""
LONGEST = 4
"""Default maximum number of steps from start to goal; `environment.config.steps` overrides it."""
FREE, WALL, GOAL, WALKER = (235, 235, 235), (30, 30, 30), (40, 180, 70), (215, 50, 40)
"""Colours of cells: red, green and blue."""

Cell = tuple[int, int]


class Maze:
    """A walk on a grid of lines such as `.#G`: `S` is the start, `G` the goal, `#` a wall. The edge is a wall too."""

    def __init__(self, grid: list[str]):
        self.grid = grid
        self.free = {(y, x) for y, line in enumerate(grid) for x, mark in enumerate(line) if mark != "#"}
        self.here = self._find("S")
        self.goal = self._find("G")
        self.distances = self._distances()

    @classmethod
    def from_truth(cls, truth: dict[str, Any]) -> Maze:
        """Build the maze from a row's `ground_truth`.

        Raises:
            UserError: the row describes no maze, or the goal cannot be reached.
        """
        grid = truth.get("grid")
        lines = isinstance(grid, list) and all(isinstance(line, str) and set(line) <= set(".#SG") for line in grid)
        drawn = "".join(grid) if lines and isinstance(grid, list) else ""
        is_maze = drawn.count("S") == drawn.count("G") == 1 and len(set(map(len, truth["grid"]))) == 1
        maze = cls(list(truth["grid"])) if is_maze else None
        if maze is None or maze.here not in maze.distances:
            raise UserError(
                f"ground_truth={truth} is no maze row; write lines of one length of . and # with one S and a G that "
                "can be reached, such as {'grid': ['S.#', '#.G']}"
            )
        return maze

    @property
    def solved(self) -> bool:
        return self.here == self.goal

    def go(self, direction: str) -> None:
        """Take a step; a step into a wall leaves the position unchanged."""
        to = _moved(self.here, STEPS[direction])
        self.here = to if to in self.free else self.here

    def nearer(self) -> list[str]:
        """Return the first directions of all shortest ways to the goal."""
        ways = ((name, self.distances.get(_moved(self.here, step))) for name, step in STEPS.items())
        return [name for name, distance in ways if distance == self.distances[self.here] - 1]

    def picture(self, cell: int) -> NDArray[np.uint8]:
        """Return the pixels [lines x cell, columns x cell, 3] of the maze: a square of `cell` pixels for each cell."""
        colours = np.array(
            [[FREE if (y, x) in self.free else WALL for x in range(len(self.grid[0]))] for y in range(len(self.grid))]
        )
        colours[self.goal] = GOAL
        colours[self.here] = WALKER
        return colours.astype(np.uint8).repeat(cell, 0).repeat(cell, 1)

    def _find(self, mark: str) -> Cell:
        return next((y, x) for y, line in enumerate(self.grid) for x, found in enumerate(line) if found == mark)

    def _distances(self) -> dict[Cell, int]:
        """Return the number of steps to the goal for every cell from which it can be reached."""
        distances, todo = {self.goal: 0}, deque([self.goal])
        while todo:
            cell = todo.popleft()
            for step in STEPS.values():
                if (to := _moved(cell, step)) in self.free and to not in distances:
                    distances[to] = distances[cell] + 1
                    todo.append(to)
        return distances


def _moved(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


def solve(maze: Maze) -> list[str]:
    """Walk a shortest way to the goal, and return its directions."""
    walked = []
    while not maze.solved:
        walked.append(maze.nearer()[0])
        maze.go(walked[-1])
    return walked


def draw(rng: random.Random, size: int, steps: int) -> dict[str, Any]:
    """Draw the `ground_truth` of a new row: a grid of `size` x `size` cells with the goal `SHORTEST` to `steps` steps
    away."""
    while True:
        cells = ["#" if rng.random() < BLOCKED_SHARE else "." for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        cells[start], cells[goal] = "S", "G"
        grid = ["".join(cells[line * size : (line + 1) * size]) for line in range(size)]
        maze = Maze(grid)
        if SHORTEST <= maze.distances.get(maze.here, 0) <= steps:
            return {"grid": grid}
