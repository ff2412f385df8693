"""All texts of the environment, and the messages that hold its pictures."""

from __future__ import annotations

from envs.visual_maze.maze import Maze
from mtrl.types import Message
from mtrl.utils.images import image_part

MALFORMED = "write one <move>"
RULES = """You walk through a maze that you see in a picture: you are the red square, the green square is the goal, \
and dark squares are walls. In each turn, reason first, then take one step: <move>up</move>, <move>down</move>, \
<move>left</move> or <move>right</move>.
After each step you see the new picture. You win when you reach the goal. The number of steps is limited."""
"""Instructions for language models; the tiny policy knows the rules from its warm start."""


def prompt(maze: Maze, cell: int, full: bool) -> list[Message]:
    """Return the prompt of a row."""
    return [*([{"role": "system", "content": RULES}] if full else []), shown(maze, cell)]


def shown(maze: Maze, cell: int, text: str = "") -> Message:
    """Return the message that shows the maze, after a text if there is one."""
    before = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": [*before, image_part(maze.picture(cell))]}
