"""Functions of SQLite that the sandbox replaces: those that read the clock, and `printf`, whose widths are bounded.

With a frozen clock, a query has the same result at any time. `printf('%.*c', 2000000000, 'x')` is one instruction that
takes seconds. No progress handler runs within an instruction, so it could not be stopped, and a format may hold a
hundred widths.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from contextlib import closing
from functools import cache, partial
from typing import Any

NOW = "2025-01-01 00:00:00"
"""Current time in every query, in UTC."""
_KEYWORDS = {"current_timestamp": NOW, "current_date": NOW[:10], "current_time": NOW[11:]}
_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff")
_NOW_WORDS = ("now", "subsec", "subsecond")
_ZONES = ("localtime", "utc")
_WIDTHS = re.compile(r"%[-+ #0,!]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?")
_plain = threading.local()
"""A connection per thread, with SQLite's own `printf`."""


def freeze_clock(connection: sqlite3.Connection) -> None:
    """Replace the functions that read the clock or the time zone: `now` is `NOW`, and the local time is UTC."""
    for name, value in _KEYWORDS.items():
        connection.create_function(name, 0, partial(str, value), deterministic=True)
    clock = _Clock()
    for name in _functions():
        connection.create_function(name, -1, partial(clock.compute, name), deterministic=True)


@cache
def _functions() -> list[str]:
    """Return the names of `_FUNCTIONS` that this SQLite has; old versions lack `unixepoch` and `timediff`. They are
    asked for once in a process: the list of all functions takes longer than a query."""
    with closing(sqlite3.connect(":memory:")) as connection:
        known = {name for (name,) in connection.execute("select name from pragma_function_list")}
    return [name for name in _FUNCTIONS if name in known]


class _Clock:
    """SQLite's own functions, on a separate connection, with every word for the present time replaced."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()

    def compute(self, name: str, *arguments: Any) -> Any:
        """Return the value of the function, with words for the present time replaced."""
        marks = ", ".join("?" * len(arguments := _frozen(name, arguments)))
        with self._lock:
            return self._connection.execute(f"select {name}({marks})", arguments).fetchone()[0]


def _frozen(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without the words that mean the present time or the time zone of this machine."""
    first = 1 if name == "strftime" else 0  # the format comes before the time
    times = 2 if name == "timediff" else 1
    if len(arguments) == first and name != "timediff":
        return (*arguments, NOW)
    frozen: list[Any] = list(arguments[:first])
    for place, argument in enumerate(arguments[first:]):
        word = _word(argument)
        if place < times and word in _NOW_WORDS:
            frozen += [NOW] if word == "now" or name == "timediff" else [NOW, argument]
        elif place < times or word not in _ZONES:
            frozen.append(argument)
    return tuple(frozen)


def _word(argument: Any) -> str:
    text = argument.decode("utf-8", "replace") if isinstance(argument, bytes) else str(argument)
    return text.partition("\0")[0].strip().lower()


class FormatError(ValueError):
    """A width or precision is too large. The model sees the text of this error."""


def bounded_printf(most: int, *arguments: Any) -> Any:
    """Return SQLite's `printf(*arguments)`, if its widths sum to at most `most` characters.

    Raises:
        FormatError: the widths sum to more.
    """
    template = arguments[0] if arguments else ""
    template = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    widths = [width for both in _WIDTHS.findall(template) for width in both if width]
    if "*" in widths:  # any of the arguments may be the width
        widths += [str(int(min(abs(each), 1e10))) for each in arguments[1:] if isinstance(each, int | float)]
    if sum(most + 1 if len(width) > 9 else int(width) for width in widths if width != "*") > most:
        raise FormatError(f"a width of printf is larger than {most}")
    if not hasattr(_plain, "connection"):
        _plain.connection = sqlite3.connect(":memory:", isolation_level=None)
        _plain.connection.text_factory = lambda data: data.decode("utf-8", "replace")
    places = ", ".join("?" * len(arguments))
    return _plain.connection.execute(f"select printf({places})", arguments).fetchone()[0]
