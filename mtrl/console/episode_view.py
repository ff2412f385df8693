"""Terminal view of one trajectory: the messages by role, and the reward of each turn."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rich.box import ROUNDED
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mtrl.types import Message, Trajectory, Turn
from mtrl.utils.images import SHOWN
from mtrl.utils.text import clean, cut, one_line, short, signed

Decode = Callable[[list[int]], str]

ROLE_STYLES = {"system": "magenta", "user": "blue", "tool": "yellow", "assistant": "green"}
TEXT_LINES = 8
TEXT_CHARS = {"system": 160}
"""Maximum length of a shown text by role, in characters. The system prompt is short because every episode has the
same one."""
OTHER_CHARS = 400
TURNS_SHOWN = 6


class EpisodeView:
    """Renders a trajectory as a panel: roles at the left, text, the reward of each turn at the right.

    All text goes through `clean` and into `Text` objects, never through markup, because text of a model is hostile.
    """

    def __init__(self, title: str, trajectory: Trajectory, decode: Decode | None = None):
        self._title = title
        self._trajectory = trajectory
        self._decode = decode

    def __rich__(self) -> RenderableType:
        trajectory = self._trajectory
        colour = reward_style(trajectory.reward)
        title = Text.assemble(f" {self._title}  ", (f"reward {signed(trajectory.reward)} ", f"bold {colour}"))
        facts = Text(f" {self._facts()} ", style="default")
        return Panel(
            self._conversation(), title=title, subtitle=facts, title_align="left", subtitle_align="left",
            border_style=colour, box=ROUNDED, padding=(0, 1),
        )  # fmt: skip

    def _facts(self) -> str:
        """Facts about the whole episode in one line. The short and certain ones come first."""
        trajectory = self._trajectory
        count = len(trajectory.turns)
        facts = [
            None if trajectory.score is None else f"score {short(trajectory.score)}",
            str(trajectory.stop_reason),
            f"{count} turn{'' if count == 1 else 's'}",
            f"{trajectory.action_tokens:,} tokens",
            one_line(trajectory.task_id, 40),
        ]
        return " · ".join(fact for fact in facts if fact)

    def _conversation(self) -> Table:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(width=9, no_wrap=True)
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(width=7, justify="right", no_wrap=True)
        turns = self._trajectory.turns
        hidden = range(TURNS_SHOWN // 2, len(turns) - TURNS_SHOWN // 2)
        for index, turn in enumerate(turns):
            if index not in hidden:
                self._add_turn(grid, turn)
            elif index == hidden[0]:
                reward = sum(turns[i].reward for i in hidden)
                grid.add_row("", Text(f"… {len(hidden)} turns …", style="dim italic"), reward_text(reward))
        for message in self._trajectory.final_observation:
            _add_message(grid, message)
        if self._trajectory.error:
            last_line = self._trajectory.error.strip().rpartition("\n")[2]
            grid.add_row(Text("error", style="bold red"), Text(one_line(last_line), style="red"), "")
        return grid

    def _add_turn(self, grid: Table, turn: Turn) -> None:
        for message in turn.observation:
            _add_message(grid, message)
        text = self._decode(turn.action_ids) if self._decode else turn.text
        grid.add_row(Text("assistant", style="bold green"), _body(text, "assistant"), reward_text(turn.reward))
        parts = [f"{one_line(name, 40)} {signed(value)}" for name, value in turn.components.items() if value]
        if parts:
            grid.add_row("", Text(" · ".join(parts), style="dim italic"), "")


def _add_message(grid: Table, message: Message) -> None:
    role = one_line(message.get("role", "?"), 9)
    grid.add_row(
        Text(role, style=f"bold {ROLE_STYLES.get(role, 'white')}"), _body(message_text(message), role, "dim"), ""
    )


def _body(text: str, role: str, style: str = "") -> Text:
    shown = clean(cut(text.strip("\n"), TEXT_CHARS.get(role, OTHER_CHARS), TEXT_LINES))
    return Text(shown, style=style) if shown.strip() else Text("(empty)", style="dim italic")


def message_text(message: Message) -> str:
    """Return the text of a chat message, its tool calls included. Environments may put any type into both."""
    values = message.get("content") or "", message.get("tool_calls") or []
    parts = (part for value in values for part in (value if isinstance(value, list) else [value]))
    return "\n".join(filter(None, map(_part_text, parts)))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") == "image":
        return SHOWN
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    return json.dumps(part.get("function", part) if isinstance(part, dict) else part, ensure_ascii=False, default=str)


def reward_style(reward: float) -> str:
    return "green" if reward > 0 else "red" if reward < 0 else "yellow"


def reward_text(reward: float) -> Text:
    """Return the reward of a turn as text: bold and coloured if it is not 0, else dim."""
    return Text(signed(reward), style=f"bold {reward_style(reward)}" if reward else "dim")
