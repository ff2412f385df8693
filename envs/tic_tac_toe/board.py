"""The board, its lines, and the fixed opponent."""

from __future__ import annotations

from functools import cache

EMPTY = "." * 9
"""A board is a text of nine marks, line by line: `x`, `o`, or `.` for a free cell. Cells are called 1 to 9."""
OTHER = {"x": "o", "o": "x"}
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def free(board: str) -> list[str]:
    """Return the names of the free cells."""
    return [str(place + 1) for place, mark in enumerate(board) if mark == "."]


def placed(board: str, cell: str, mark: str) -> str:
    """Return the board after `mark` took a free cell."""
    place = int(cell) - 1
    return board[:place] + mark + board[place + 1 :]


@cache  # the search for a row's winning moves asks for the same boards many times
def wins(board: str, mark: str) -> bool:
    """Whether `mark` has three in a line."""
    return any(all(board[place] == mark for place in line) for line in LINES)


def is_over(board: str) -> bool:
    """Whether a line is complete or no cell is free."""
    return "." not in board or wins(board, "x") or wins(board, "o")


def reply(board: str, mark: str, order: str) -> str:
    """Return the move of the fixed opponent: the cell that completes a line, else the free cell that is first in
    `order`, a permutation of the names of the cells. It never defends itself."""
    cells = [cell for cell in order if cell in free(board)]
    return next((cell for cell in cells if wins(placed(board, cell, mark), mark)), cells[0])


def view(board: str, mark: str) -> str:
    """Return the board as the role with this mark sees it: `+` is its own, `-` is the other's, and a free cell shows
    its name, so that the first board is `123/456/789`."""
    shown = {mark: "+", OTHER[mark]: "-"}
    cells = [shown.get(each, str(place + 1)) for place, each in enumerate(board)]
    return "/".join("".join(cells[line : line + 3]) for line in (0, 3, 6))
