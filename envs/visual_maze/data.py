"""Rows of the visual maze: generated mazes."""

from __future__ import annotations

import logging
import random
from hashlib import sha256
from typing import Any

from envs.visual_maze.maze import LONGEST, SHORTEST, STEPS, Maze, draw, solve
from envs.visual_maze.prompts import prompt as prompt_of
from mtrl.datasets import Splits, cap
from mtrl.environments.config_values import check_count
from mtrl.errors import UserError
from mtrl.types import Row

log = logging.getLogger(__name__)

CELL = 4
"""Default side of a cell in the picture, in pixels: one patch of the tiny policy, so that a token shows 2 x 2 cells."""
HELD_OUT = 8
"""Number of mazes of which one is held out, on average."""
MOST_MISSES = 2000
"""Maximum number of consecutive draws without a new maze, after which the mazes count as exhausted."""


def load(data: Any, seed: int, size: int = 4, steps: int = LONGEST, cell: int = CELL, prompt: str = "short") -> Splits:
    """Generate the rows.

    Args:
        data: the `data` section of the config.
        seed: seed of the generated mazes.
        size: side length of the square grid, in cells.
        steps: maximum number of steps from start to goal.
        cell: side of a cell in the picture, in pixels.
        prompt: full, with rules for a language model, or short.

    Raises:
        UserError: a value is out of range, there are too few different mazes to hold some out, or `data.path` is set.
    """
    if data.path is not None:
        raise UserError(f"data.path={data.path} is not read by visual_maze, which is generated; set data.path=null")
    check_count("size", size, 3, 9)
    check_count("steps", steps, SHORTEST, 40)
    check_count("cell", cell, 1, 256)
    counts = {"train": data.synthetic_train_rows, "test": data.synthetic_test_rows}
    grids = {split: _grids(split, count, seed, size, steps) for split, count in counts.items()}
    rows = {
        split: [_row(f"{split}-{index}", split, truth, cell, prompt == "full") for index, truth in enumerate(truths)]
        for split, truths in grids.items()
    }
    return cap(Splits(**rows), data)


def gold(row: Row) -> list[str]:
    """Return the responses of a player that walks a shortest way."""
    return [f"<move>{direction}</move>" for direction in solve(Maze.from_truth(row["ground_truth"]))]


def decoys(row: Row) -> list[str]:
    """Return well-formed moves other than the last one of `gold`."""
    return [move for direction in STEPS if (move := f"<move>{direction}</move>") != gold(row)[-1]]


def is_held_out(key: str) -> bool:
    """Whether the maze belongs to the test split. This depends only on the maze, not on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def _grids(split: str, count: int, seed: int, size: int, steps: int) -> list[dict[str, Any]]:
    """Draw `count` mazes of a split; all are distinct, so there may be fewer of them."""
    rng, misses = random.Random(f"visual_maze/{seed}/{split}"), 0
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count and misses < MOST_MISSES:
        truth = draw(rng, size, steps)
        key = _key(truth)
        misses += 1
        if is_held_out(key) == (split == "test") and key not in found:
            found[key], misses = truth, 0
    if len(found) < count:
        log.warning("visual_maze: %d different %s mazes instead of %d: there are no more", len(found), split, count)
    return list(found.values())


def _key(truth: dict[str, Any]) -> str:
    """Return a key that identifies the maze."""
    return " ".join(truth["grid"])


def _row(row_id: str, split: str, truth: dict[str, Any], cell: int, full: bool) -> Row:
    maze = Maze.from_truth(truth)
    return {
        "id": row_id,
        "prompt": prompt_of(maze, cell, full),
        "ground_truth": truth,
        "split": split,
        "key": _key(truth),
    }
