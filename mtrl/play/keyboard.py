"""Input from a person or a pipe: responses of one or more lines, and commands."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

COMMANDS = {
    "/help": "this list",
    "/gold": "show the responses of the perfect player to this row",
    "/row": "play another row: /row 3, or /row ID",
    "/skip": "leave this episode and play the next row",
    "/quit": "end; so do Ctrl-D and Ctrl-C",
}
PROMPT, CONTINUED = "> ", ". "
_FENCE = re.compile(r'"{3,}')
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True)
class PlayerCommand:
    """A command with its argument: `/row 3` is `PlayerCommand("/row", "3")`."""

    name: str
    argument: str = ""


class Keyboard:
    """Reads one response or command at a time. A line is a response. A line of three or more `"` opens a response of
    several lines, which the same line closes. Empty lines between responses are skipped.

    Characters that no tokenizer could have decoded, such as halves of surrogate pairs, become replacement characters.
    """

    def __init__(self, stream: TextIO | None, note: Callable[[str], None]):
        """`stream` is None in a program whose standard input is closed."""
        stream = io.StringIO() if stream is None else stream
        self.is_terminal = stream.isatty() and stream is sys.stdin
        self._stream, self._note = stream, note
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        if self.is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  # arrow keys and history for `input`

    def read(self) -> str | PlayerCommand | None:
        """Return the next response or command; None at the end of the input."""
        while (line := self._line(PROMPT)) is not None:
            if _FENCE.fullmatch(line):
                return self._block(line)
            word, _, argument = line.strip().partition(" ")
            if word in COMMANDS:
                return PlayerCommand(word, argument.strip())
            if _COMMAND.fullmatch(line.strip()):
                self._note(f'{word} is no command; /help lists them. To send it, put it between two lines of """')
            elif line.strip():
                return line
        return None

    def _block(self, fence: str) -> str | None:
        lines: list[str] = []
        while (line := self._line(CONTINUED)) is not None:
            if line == fence:
                return "\n".join(lines)
            lines.append(line)
        self._note(f"the input ended before the line of {fence} that ends a response, so it was not sent")
        return None

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its line break; None at the end of the input."""
        if self.is_terminal:
            try:
                line = input(prompt)
            except EOFError:
                return None
        else:
            line = self._stream.readline()
            if not line:
                return None
        return line.rstrip("\r\n").encode(errors="replace").decode()
