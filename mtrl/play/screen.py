"""Output for the person at the keyboard: messages, rewards, and the end of the episode."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from mtrl.console.episode_view import ROLE_STYLES, message_text, reward_style
from mtrl.environments.base import StepResult
from mtrl.environments.tool_calls import format_call
from mtrl.play.keyboard import COMMANDS
from mtrl.types import Message, StopReason, Trajectory
from mtrl.utils.text import clean, cut, one_line, short, signed

CHARACTERS, LINES = 20_000, 400
"""Maximum number of characters, and of lines, to show per message. A longer message is cut in the middle, with the size
of the omitted part."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


class Screen:
    """Prints boxes, with colours in a terminal. Text of other origin is sanitised by `clean`."""

    def __init__(self, file: TextIO | None = None, width: int | None = None):
        file = file or sys.stdout
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")  # a character that the terminal cannot show must not end the session
        self._console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)

    def opening(self, title: str, prompt: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Print the row, the prompt and the tools, as the policy receives them."""
        self._print(Rule(Text(one_line(title), style="bold"), align="left", style="cyan"))
        self.messages(prompt)
        if tools:
            self._print(_tools(tools))

    def messages(self, messages: Sequence[Message]) -> None:
        """Print a panel for each message."""
        for message in messages:
            role = one_line(message.get("role", "?"), 20)
            self._print(_panel(role, _body(message_text(message)), ROLE_STYLES.get(role, "white")))

    def response(self, text: str) -> None:
        """Print a response that was not typed in this terminal."""
        self.messages([{"role": "assistant", "content": text}])

    def turn(self, number: int, max_turns: int, result: StepResult, observation: Sequence[Message]) -> None:
        """Print the reward of the turn and the observation."""
        line = Text.assemble(
            (f"turn {number} of {max_turns}", "bold"),
            "  reward ",
            (signed(result.reward), f"bold {reward_style(result.reward)}"),
        )
        for name, values in (("components", result.components), ("metrics", result.metrics)):
            if values:
                listed = ", ".join(f"{one_line(key, 40)} {short(value)}" for key, value in values.items())
                line.append(f"  {name}: {listed}", style="dim")
        if result.done:
            line.append("  truncated" if result.truncated else "  done", style="bold")
        self._print(line)
        self.messages(observation)

    def ending(self, trajectory: Trajectory, own: float, succeeds: bool, disagree: bool) -> None:
        """Print the total reward and the score. `own` is the reward of the environment itself; `succeeds` says whether
        the score is a success."""
        if trajectory.error:
            self._print(_panel("the episode failed", Text(_error_line(trajectory), style="red"), "red"))
            return
        turns = ", ".join(signed(turn.reward) for turn in trajectory.turns)
        environment_reward = (
            "" if abs(own - trajectory.reward) < 1e-9 else f"; the environment itself gave {signed(own)}"
        )
        total = (signed(trajectory.reward), f"bold {reward_style(trajectory.reward)}")
        count = len(trajectory.turns)
        title = f"{trajectory.stop_reason} after {count} turn{'' if count == 1 else 's'}"
        parts: list[RenderableType] = [
            Rule(Text(title, style="bold"), align="left", style="green"),
            Text.assemble("reward  ", total, (f"  turns: {turns}{environment_reward}", "dim")),
            Text.assemble("score   ", (short(trajectory.score or 0.0), "bold"), ("  by the scorer", "dim")),
        ]
        if disagree:
            verdict = "solves" if succeeds else "does not solve"
            parts.append(
                Text(
                    f"reward and scorer disagree: the environment gave {signed(own)}, and by the scorer the episode "
                    f"{verdict} the row",
                    style="bold yellow",
                )
            )
        self._print(Lines(*parts))

    def help(self) -> None:
        self.note('A line is a response. For several lines, write """ alone on a line before and after them.')
        for name, what in COMMANDS.items():
            self.note(f"{name:<6} {what}")

    def gold(self, responses: Sequence[str]) -> None:
        """Print the perfect player's responses, in order."""
        for number, response in enumerate(responses, 1):
            self._print(_panel(f"gold {number}", _body(response), "magenta"))

    def note(self, text: str) -> None:
        self._print(Text(one_line(text, 2000), style="dim"), soft_wrap=True)

    def warning(self, text: str) -> None:
        self._print(Text(one_line(text, 2000), style="yellow"), soft_wrap=True)

    def summary(self, text: str) -> None:
        self._print(Rule(style="cyan"), Text(text, style="bold"))

    def _print(self, *parts: RenderableType, soft_wrap: bool = False) -> None:
        self._console.print(*parts, sep="\n", soft_wrap=soft_wrap)


def _panel(title: str, body: RenderableType, style: str) -> Panel:
    return Panel(
        body, title=Text(title, style=f"bold {style}"), title_align="left", border_style=style, box=ROUNDED,
        padding=(0, 1),
    )  # fmt: skip


def _body(text: str) -> Text:
    shown = clean(cut(text, CHARACTERS, LINES))
    return Text(shown, overflow="fold") if shown.strip() else Text("(empty)", style="dim italic")


def _tools(schemas: Sequence[dict[str, Any]]) -> Panel:
    """Return a panel with name, description and JSON schema of the parameters of each tool, and the form of a call."""
    parts: list[RenderableType] = []
    for schema in schemas:
        function = schema.get("function", schema)
        parts.append(Text(one_line(function.get("name", "?")), style="bold yellow"))
        parts.append(_body(str(function.get("description") or "")))
        parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False, default=str)
        parts.append(Text(clean(parameters), style="dim", overflow="fold"))
    call = format_call("NAME", {"PARAMETER": "VALUE"})
    parts.append(Text(f"call one with {call}", style="dim italic", overflow="fold"))
    return _panel("tools", Lines(*parts), "yellow")


def _error_line(trajectory: Trajectory) -> str:
    """Return the first line of the error, and the code line that raised it."""
    first, _, trace = (trajectory.error or "").partition("\n")
    frames = _FRAME.findall(trace)
    if trajectory.stop_reason == StopReason.TIMEOUT or not frames:
        return one_line(first, 2000)
    file, line, function = frames[-1]
    return one_line(f"{first} ({Path(file).name}, line {line}, in {function})", 2000)
