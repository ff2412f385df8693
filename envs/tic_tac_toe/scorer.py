"""The scorer, independent of the reward: the game is played again from the assistant's messages. This module shares no
code with `environment.py` or `board.py`.

Against the fixed opponent its answers are computed here from the row. In self-play, where they are another policy's,
they are read from the boards that the role has seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtrl.types import Message, Row, StopReason, Trajectory

_TAGS = re.compile(r"(</?move>)")
_BOARD = re.compile(r"([1+-])([2+-])([3+-])/([4+-])([5+-])([6+-])/([7+-])([8+-])([9+-])(.*)", re.DOTALL)
_SUMS = ({1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {1, 4, 7}, {2, 5, 8}, {3, 6, 9}, {1, 5, 9}, {3, 5, 7})


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the role of the trajectory, or else of the row, wins; else 0.0."""
    messages = trajectory.messages
    if trajectory.role is not None:
        return float(_won_as_seen(messages))
    return float(_won_by_replay([_move(message) for message in _responses(messages)], row["ground_truth"]))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the game was finished, and the last assistant message holds one move."""
    responses = _responses(trajectory.messages)
    return trajectory.stop_reason == StopReason.DONE and bool(responses) and _move(responses[-1]) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`: the share of the assistant's messages that hold one move."""
    responses = _responses(trajectory.messages)
    return {"format": sum(_move(message) is not None for message in responses) / max(len(responses), 1)}


def _responses(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.get("role") == "assistant"]


def _move(message: Message) -> int | None:
    """Return the cell between `<move>` and `</move>` in a message that has each tag once, in this order; else None."""
    content = message.get("content")
    parts = _TAGS.split(content.split("</think>")[-1]) if isinstance(content, str) else []
    if len(parts) != 5 or parts[1] != "<move>" or parts[3] != "</move>":
        return None
    found = re.fullmatch(r"\s*([1-9])\s*", parts[2])
    return int(found[1]) if found else None


def _complete(cells: set[int]) -> bool:
    return any(line <= cells for line in _SUMS)


def _won_by_replay(moves: list[int | None], truth: dict[str, str]) -> bool:
    """Whether these moves win against the fixed opponent, which completes a line or takes its first free cell."""
    own, other, order = set[int](), set[int](), [int(cell) for cell in truth["order"]]

    def answer() -> None:
        left = [cell for cell in order if cell not in own | other]
        other.add(next((cell for cell in left if _complete(other | {cell})), left[0]))

    if truth["role"] == "o":
        answer()
    for move in moves:
        if move is None or move in own | other or _complete(other):
            return False
        own.add(move)
        if _complete(own):
            return True
        if len(own | other) == 9:
            return False
        answer()
    return False


def _won_as_seen(messages: list[Message]) -> bool:
    """Whether the last move completes a line on the last board before it, or the other player then made no valid
    move."""
    boards, last = list(_boards(messages)), None
    for place, message in enumerate(messages):
        if message.get("role") == "assistant":
            last = place
    if last is None:
        return False
    before = [own for place, own, _ in boards if place < last]
    occupied = [taken for place, _, taken in boards if place < last]
    move = _move(messages[last])
    if not before or move is None or move in occupied[-1]:
        return False
    after = [message["content"] for message in messages[last + 1 :]]
    gave_up = any(str(text).endswith("; the other player made no valid move") for text in after)
    return gave_up or _complete(before[-1] | {move})


def _boards(messages: list[Message]) -> Iterator[tuple[int, set[int], set[int]]]:
    """Yield the place of each message with a board, the own cells on it, and the taken cells."""
    for place, message in enumerate(messages):
        found = _BOARD.fullmatch(str(message.get("content"))) if message.get("role") == "user" else None
        if found:
            marks = found.groups()[:9]
            own = {cell for cell, mark in enumerate(marks, 1) if mark == "+"}
            yield place, own, own | {cell for cell, mark in enumerate(marks, 1) if mark == "-"}
