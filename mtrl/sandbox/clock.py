"""SQLite's date and time functions with a frozen clock, so that a query has the same result at any time."""

from __future__ import annotations

import sqlite3
import threading
from functools import partial
from typing import Any

NOW = "2025-01-01 00:00:00"
"""Current time in every query, in UTC."""
_KEYWORDS = {"current_timestamp": NOW, "current_date": NOW[:10], "current_time": NOW[11:]}
_FUNCTIONS = ("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff")
_NOW_WORDS = ("now", "subsec", "subsecond")
_ZONES = ("localtime", "utc")


def freeze(connection: sqlite3.Connection) -> None:
    """Replace the functions that read the clock or the time zone: `now` is `NOW`, and the local time is UTC."""
    for name, value in _KEYWORDS.items():
        connection.create_function(name, 0, partial(str, value), deterministic=True)
    clock = _Clock()
    for name in _FUNCTIONS:
        if clock.has(name):
            connection.create_function(name, -1, partial(clock.ask, name), deterministic=True)


class _Clock:
    """SQLite's own functions, on a separate connection, with every word for the present time replaced."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        """Whether this SQLite has the function; old versions lack `unixepoch` and `timediff`."""
        found = self._connection.execute("select 1 from pragma_function_list where name = ?", (name,)).fetchone()
        return found is not None

    def ask(self, name: str, *arguments: Any) -> Any:
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
