"""A trajectory as plain text, for trackers that show text."""

from __future__ import annotations

from mtrl.console.episode_view import message_text
from mtrl.types import Message, Trajectory
from mtrl.utils.text import clean, cut, one_line, signed

LONGEST_MESSAGE = 4000


def conversation(trajectory: Trajectory, longest: int) -> str:
    """Return the messages with their roles and the reward of each turn, cleaned and cut to about `longest`
    characters."""
    lines: list[str] = []
    for number, turn in enumerate(trajectory.turns):
        lines += map(_said, turn.observation)
        head = f"[assistant, turn {number}, reward {signed(turn.reward)}]"
        lines.append(f"{head}\n{cut(turn.text, LONGEST_MESSAGE, 1)}")
    lines += map(_said, trajectory.final_observation)
    return clean(cut("\n".join(lines), longest, 1))


def _said(message: Message) -> str:
    return f"[{one_line(message.get('role', '?'), 20)}]\n{cut(message_text(message), LONGEST_MESSAGE, 1)}"
