"""One walk through a maze that the model sees in pictures."""

from __future__ import annotations

from typing import Any, ClassVar

from envs.visual_maze import prompts
from envs.visual_maze.data import CELL
from envs.visual_maze.maze import LONGEST, STEPS, Maze
from mtrl.environments.base import BaseEnvironment, StepResult
from mtrl.errors import UserError
from mtrl.types import Message, Row

OPEN, CLOSE = "<move>", "</move>"


def parse_move(response: str) -> str | None:
    """Return the direction in the only `<move>…</move>` of a response, without its thinking; None if there is not
    exactly one, or if it holds no direction."""
    visible = response.rpartition("</think>")[2]
    if visible.count(OPEN) != 1 or visible.count(CLOSE) != 1:
        return None
    move, closed, _ = visible.partition(OPEN)[2].partition(CLOSE)
    word = move.strip(" \t\n").lower()
    return word if closed and word in STEPS else None


class VisualMazeEnv(BaseEnvironment):
    """In each turn the model takes one step and sees the new picture, until it reaches the goal or the turns run out.
    The reward is 1.0 for reaching the goal.

    A response without a valid move uses up its turn.
    """

    reward_schemes: ClassVar[tuple[str, ...]] = ("default",)

    def __init__(self, max_turns: int = 6, steps: int = LONGEST, cell: int = CELL, **config: Any):
        super().__init__(max_turns)  # the other keys of environment.config are for the loader
        if steps > max_turns:
            raise UserError(
                f"environment.config.steps={steps} asks for mazes that generator.max_turns={max_turns} cannot solve; "
                "raise max_turns to half as many again, or lower steps"
            )
        self.cell = cell
        self.reset()

    def reset(self, row: Row | None = None) -> list[Message] | None:
        super().reset(row)
        self.maze: Maze | None = None
        return None

    def step(self, response: str, ground_truth: dict[str, Any]) -> StepResult:
        self.current_turn += 1
        if self.maze is None:
            self.maze = Maze.from_truth(ground_truth)
        move = parse_move(response)
        if move is not None:
            self.maze.go(move)
        solved = self.maze.solved
        done = solved or self.current_turn >= self.max_turns
        return StepResult(
            reward=float(solved),
            observation=None if done else [prompts.shown(self.maze, self.cell, "" if move else prompts.MALFORMED)],
            done=done,
            truncated=done and not solved,
            components={"solved": float(solved)},
            metrics={"malformed": float(move is None)},
        )
