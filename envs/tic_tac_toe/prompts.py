"""All texts of the environment, except the board."""

from __future__ import annotations

from mtrl.environments.worked_example import Line, with_example
from mtrl.types import Message, Row

FORFEITED = "the other player made no valid move"
RULES = """You play tic-tac-toe. You see the board line by line: + is your mark, - is the mark of the other player, \
and a digit is the name of a free cell.
In each turn, reason first, then take one free cell, such as <move>5</move>. The first player with three marks in a \
line, column or diagonal wins. A reply without one move to a free cell loses the game."""
"""Instructions for language models; the tiny policy knows the rules from its warm start."""
EXAMPLE: list[Line] = [
    ("User", "123/456/789"),
    ("Assistant", "The centre is part of four lines. <move>5</move>"),
    ("User", "1-3/4+6/789"),
    ("Assistant", "A corner makes a diagonal with the centre. <move>1</move>"),
    ("User", "+--/4+6/789"),
    ("Assistant", "Cells 1, 5 and 9 are a diagonal. <move>9</move>"),
]
EXAMPLE_ROW: Row = {
    "id": "worked example of tic_tac_toe",
    "prompt": [{"role": "user", "content": "123/456/789"}],
    "role": "x",
    "ground_truth": {"role": "x", "order": "231456789"},
}
"""The row that the example solves."""


def prompt(opening: str, full: bool) -> list[Message]:
    """Return the prompt of a row."""
    user = {"role": "user", "content": opening}
    return [{"role": "system", "content": with_example(RULES, EXAMPLE)}, user] if full else [user]
