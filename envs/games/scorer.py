"""The scorer, independent of the reward: the game is replayed from the assistant's messages. This module shares no code
with `environment.py`, `reward.py` or the games."""

from __future__ import annotations

import re
from typing import Any

from mtrl.types import Row, StopReason, Trajectory

_TAGS = re.compile(r"(</?move>)")
_GUESS = re.compile(r"[0-9 ,\t\n]*")
_COMPASS = {"north": -1j, "south": 1j, "west": -1, "east": 1}


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the moves of the assistant's messages, replayed on the row's game, solve it; else 0.0."""
    moves = [move for message in trajectory.messages if (move := _move(message)) is not None]
    truth = row["ground_truth"]
    return float(_breaks(moves, truth) if truth["game"] == "mastermind" else _arrives(moves, truth))


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the episode was completed, and the last assistant message holds one move."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return trajectory.stop_reason == StopReason.DONE and bool(responses) and _move(responses[-1]) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`: the share of the assistant's messages that hold one move."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return {"format": sum(_move(message) is not None for message in responses) / max(len(responses), 1)}


def _move(message: dict[str, Any]) -> str | None:
    """Return the text between `<move>` and `</move>` in an assistant message that has each tag once, in this order;
    else None."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return None
    parts = _TAGS.split(content.split("</think>")[-1])
    if len(parts) != 5 or parts[1] != "<move>" or parts[3] != "</move>" or len(parts[2]) > 64:
        return None
    return parts[2]


def _breaks(moves: list[str], truth: dict[str, Any]) -> bool:
    """Whether one of the guesses is the code."""
    guesses = (re.findall("[0-9]", move) for move in moves if _GUESS.fullmatch(move))
    return any(guess == list(truth["code"]) for guess in guesses)


def _arrives(moves: list[str], truth: dict[str, Any]) -> bool:
    """Whether the walk reaches the goal. Positions are complex numbers: column + line * i."""
    grid = {column + line * 1j: mark for line, marks in enumerate(truth["grid"]) for column, mark in enumerate(marks)}
    here = next(place for place, mark in grid.items() if mark == "S")
    for move in moves:
        to = here + _COMPASS.get(re.sub(r"\A[ \t\n]+|[ \t\n]+\Z", "", move).lower(), 0)
        here = to if grid.get(to, "#") != "#" else here
        if grid[here] == "G":
            return True
    return False
