"""The scorer, independent of the reward: the walk is replayed from the assistant's messages. This module shares no code
with `environment.py` or `maze.py`."""

from __future__ import annotations

import re
from typing import Any

from mtrl.types import Row, StopReason, Trajectory

_TAGS = re.compile(r"(</?move>)")
_WAYS = {"up": -1j, "down": 1j, "left": -1, "right": 1}


def score(trajectory: Trajectory, row: Row) -> float:
    """Return 1.0 if the moves of the assistant's messages, replayed on the row's grid, reach the goal; else 0.0.
    Positions are complex numbers: column + line * i."""
    lines = row["ground_truth"]["grid"]
    grid = {column + line * 1j: mark for line, marks in enumerate(lines) for column, mark in enumerate(marks)}
    here = next(place for place, mark in grid.items() if mark == "S")
    for message in trajectory.messages:
        to = here + (_way(message) or 0)
        here = to if grid.get(to, "#") != "#" else here
        if grid[here] == "G":
            return 1.0
    return 0.0


def answered(trajectory: Trajectory, row: Row) -> bool:
    """Whether the episode was completed, and the last assistant message holds one move."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return trajectory.stop_reason == StopReason.DONE and bool(responses) and _way(responses[-1]) is not None


def measure(trajectory: Trajectory, row: Row) -> dict[str, float]:
    """Return `format`: the share of the assistant's messages that hold one move."""
    responses = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return {"format": sum(_way(message) is not None for message in responses) / max(len(responses), 1)}


def _way(message: dict[str, Any]) -> complex | None:
    """Return the step of an assistant message that has the tags `<move>` and `</move>` once, in this order, around a
    direction; else None."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return None
    parts = _TAGS.split(content.split("</think>")[-1])
    if len(parts) != 5 or parts[1] != "<move>" or parts[3] != "</move>":
        return None
    return _WAYS.get(re.sub(r"\A[ \t\n]+|[ \t\n]+\Z", "", parts[2]).lower())
