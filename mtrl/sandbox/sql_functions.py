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
_INTEGER = re.compile(r"[ \t\n\v\f\r]*[-+]?0*([0-9]+)")
"""What SQLite reads of a text or a blob that it converts to an integer; a value without it is 0."""
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
    """A width, a precision or the result of `printf` is too large. The model sees the text of this error."""


def bounded_printf(most: int, *arguments: Any) -> Any:
    """Return SQLite's `printf(*arguments)`, if its widths sum to at most `most` characters.

    Raises:
        FormatError: the widths sum to more, or the result has `2 * most` bytes or more.
    """
    if not arguments or arguments[0] is None:
        return None
    template, *values = arguments
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    widths = [width for both in _WIDTHS.findall(text) for width in both if width]
    if "*" in widths:
        widths += map(_digits, values)  # any of the arguments may be the width
    if sum(most + 1 if len(width) > 9 else int(width) for width in widths if width != "*") > most:
        raise FormatError(f"a width of printf is larger than {most}")
    result = _sqlite_printf(2 * most, template, *values)
    if result is None:  # the template has no text, or the result is too large; a letter before it shows which
        marked = b"x" + template if isinstance(template, bytes) else f"x{template}"
        if _sqlite_printf(2 * most, marked, *values) is None:
            raise FormatError(f"the result of printf has {2 * most} bytes or more")
    return result


def _digits(argument: Any) -> str:
    """Return the digits of the integer to which SQLite converts an argument, without its sign."""
    if isinstance(argument, int | float):
        return str(int(min(abs(argument), 1e10)))
    text = argument.decode("latin-1") if isinstance(argument, bytes) else argument or ""
    found = _INTEGER.match(text)
    return found[1] if found else "0"


def _sqlite_printf(longest: int, *arguments: Any) -> Any:
    """Return the result of SQLite's own `printf`; None if it has `longest` bytes or more.

    This limit is the second barrier, against widths that `_WIDTHS` does not find. It refuses no result that the sandbox
    could return: a text has up to 1.5 times as many bytes in UTF-8 as in the UTF-16 of some databases.
    """
    if not hasattr(_plain, "connection"):
        _plain.connection = sqlite3.connect(":memory:", isolation_level=None)
        _plain.connection.text_factory = lambda data: data.decode("utf-8", "replace")
    _plain.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(longest, 2**31 - 1))
    places = ", ".join("?" * len(arguments))
    try:
        return _plain.connection.execute(f"select printf({places})", arguments).fetchone()[0]
    except sqlite3.DataError:  # newer versions of SQLite raise it, older ones return NULL
        return None
