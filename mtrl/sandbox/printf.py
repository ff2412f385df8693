"""`printf` and `format` with widths that end: `printf('%.*c', 2000000000, 'x')` is one instruction, of seconds.

No progress handler runs inside of one instruction, so nothing could stop it, nor a format with a hundred of them.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from typing import Any

_WIDTHS = re.compile(r"%[-+ #0,!]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?")
_plain = threading.local()
"""A connection per thread whose `printf` is SQLite's own."""


class FormatError(ValueError):
    """A width or precision is too large; its text is told to the model."""


def bounded_printf(most: int, *arguments: Any) -> Any:
    """SQLite's `printf(*arguments)`, which may not pad to more than `most` characters in all.

    Raises:
        FormatError: it would.
    """
    template = arguments[0] if arguments else ""
    template = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    widths = [width for both in _WIDTHS.findall(template) for width in both if width]
    if "*" in widths:  # any of the arguments may be meant
        widths += [str(int(min(abs(each), 1e10))) for each in arguments[1:] if isinstance(each, int | float)]
    if sum(most + 1 if len(width) > 9 else int(width) for width in widths if width != "*") > most:
        raise FormatError(f"a width of printf is larger than {most}")
    if not hasattr(_plain, "connection"):
        _plain.connection = sqlite3.connect(":memory:", isolation_level=None)
        _plain.connection.text_factory = lambda data: data.decode("utf-8", "replace")
    places = ", ".join("?" * len(arguments))
    return _plain.connection.execute(f"select printf({places})", arguments).fetchone()[0]
