"""Maze: walk to the goal by compass directions; only the neighbouring cells and the bearing of the goal are visible."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from envs.games.outcome import Outcome
from mtrl.errors import UserError

STEPS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}
"""Change of (line, column) by direction; the order is that of observations."""
BLOCKED_SHARE = 0.4
SHORTEST = 3
"""Minimum number of steps from start to goal."""
LONGEST = 4
"""Default maximum number of steps from start to goal; `environment.config.steps` overrides it."""

Cell = tuple[int, int]


class Maze:
    """A walk on a grid of lines such as `.#G`: `S` is the start, `G` the goal, `#` blocked. The edge is blocked too."""

    def __init__(self, grid: list[str]):
        self.cells = {(y, x): mark for y, line in enumerate(grid) for x, mark in enumerate(line) if mark != "#"}
        self.here = self._find("S")
        self.goal = self._find("G")
        self.distances = self._distances()
        self.start_distance = self.distances.get(self.here, 0)

    @classmethod
    def from_truth(cls, truth: dict[str, Any]) -> Maze:
        """Build the maze from a row's `ground_truth`.

        Raises:
            UserError: the row describes no maze, or the goal cannot be reached.
        """
        grid = truth.get("grid")
        lines = isinstance(grid, list) and all(isinstance(line, str) and set(line) <= set(".#SG") for line in grid)
        drawn = "".join(grid) if lines and isinstance(grid, list) else ""
        maze = cls(grid) if grid and drawn.count("S") == drawn.count("G") == 1 else None
        if maze is None or not maze.start_distance:
            raise UserError(
                f"ground_truth={truth} is no maze row; write lines of . and # with one S and a G that can be reached, "
                "such as {'game': 'maze', 'grid': ['S.#', '#.G']}"
            )
        return maze

    @property
    def opening(self) -> str:
        """Text of the information before the first step."""
        return f"maze ; {self.view()}"

    def play(self, move: str) -> Outcome | None:
        """Take a step; None if the move is no direction. A step into a wall leaves the position unchanged."""
        step = STEPS.get(move.strip(" \t\n").lower())
        if step is None:
            return None
        to = _moved(self.here, step)
        bumped = to not in self.cells
        self.here = self.here if bumped else to
        progress = max(0.0, 1 - self.distances[self.here] / self.start_distance)
        return Outcome(("wall ; " if bumped else "") + self.view(), progress)

    def view(self) -> str:
        """Return the observation, such as `open north east ; goal 2 south 1 east`: the free directions, and the bearing
        of the goal in a straight line."""
        down, right = self.goal[0] - self.here[0], self.goal[1] - self.here[1]
        bearing = [f"{abs(down)} {'south' if down > 0 else 'north'}"] * (down != 0)
        bearing += [f"{abs(right)} {'east' if right > 0 else 'west'}"] * (right != 0)
        return f"open {' '.join(self.ways())} ; goal {' '.join(bearing)}"

    def ways(self) -> list[str]:
        """Return the free directions."""
        return [name for name, step in STEPS.items() if _moved(self.here, step) in self.cells]

    def nearer(self) -> list[str]:
        """Return the first directions of all shortest ways to the goal."""
        target = self.distances[self.here] - 1
        return [name for name in self.ways() if self.distances[_moved(self.here, STEPS[name])] == target]

    def _find(self, mark: str) -> Cell:
        return next(cell for cell, found in self.cells.items() if found == mark)

    def _distances(self) -> dict[Cell, int]:
        """Return the number of steps to the goal for every cell from which it can be reached."""
        distances, todo = {self.goal: 0}, deque([self.goal])
        while todo:
            cell = todo.popleft()
            for step in STEPS.values():
                if (to := _moved(cell, step)) in self.cells and to not in distances:
                    distances[to] = distances[cell] + 1
                    todo.append(to)
        return distances


def _moved(cell: Cell, step: Cell) -> Cell:
    return cell[0] + step[0], cell[1] + step[1]


def solve(maze: Maze) -> list[str]:
    """Walk a shortest way to the goal, and return its directions."""
    walked = []
    while maze.here != maze.goal:
        walked.append(maze.nearer()[0])
        maze.play(walked[-1])
    return walked


def draw(rng: random.Random, size: int, steps: int) -> dict[str, Any]:
    """Draw the `ground_truth` of a new row: a grid of up to `size` x `size` with the goal `SHORTEST` to `steps` steps
    away."""
    while True:
        cells = ["#" if rng.random() < BLOCKED_SHARE else "." for _ in range(size * size)]
        start, goal = rng.sample(range(size * size), 2)
        cells[start], cells[goal] = "S", "G"
        maze = Maze(["".join(cells[line * size : (line + 1) * size]) for line in range(size)])
        if SHORTEST <= maze.start_distance <= steps:
            return {"game": "maze", "grid": _cropped(maze)}


def _cropped(maze: Maze) -> list[str]:
    """Return the reachable part of the grid: mazes that differ only elsewhere are the same maze, and must have the same
    key."""
    lines, columns = ([cell[axis] for cell in maze.distances] for axis in (0, 1))
    return [
        "".join(maze.cells[y, x] if (y, x) in maze.distances else "#" for x in range(min(columns), max(columns) + 1))
        for y in range(min(lines), max(lines) + 1)
    ]
