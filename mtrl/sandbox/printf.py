"""`printf` and `format` with bounded widths: `printf('%.*c', 2000000000, 'x')` is one instruction that takes seconds.

No progress handler runs inside of one instruction, so it could not be stopped, and a format may hold a hundred widths.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from typing import Any

_WIDTHS = re.compile(r"%[-+ #0,!]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?")
_plain = threading.local()
"""A connection per thread, with SQLite's own `printf`."""


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
