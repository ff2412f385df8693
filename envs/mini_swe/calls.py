"""Hidden calls: what a row says of each, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.errors import UserError

MOST_ITEMS = 100_000


@dataclass(frozen=True)
class Call:
    """A function, its arguments, and what it gives. In a row: `[path, arguments, expected]`, or with options as a
    fourth: `["m.primes", [], [2, 3, 5], {"items": 3}]`."""

    path: str
    """Module and name, with dots."""
    arguments: list[Any]
    expected: Any
    items: int | None = None
    """The call gives an iterator, and so many of its items at most are compared, as a list."""
    tolerance: float | None = None
    """How far a number may be off where a float is expected, relative to it where it is above 1."""
    seconds: float | None = None
    """Wall time of this call alone, with the start of Python and the import."""

    @classmethod
    def of(cls, call: Sequence[Any]) -> Call:
        """A call of a row that `check_calls` has checked."""
        path, arguments, expected, *options = call
        return cls(path, arguments, expected, **(options[0] if options else {}))


def check_calls(calls: Any, row_id: str) -> list[list[Any]]:
    """The calls of a row, as they are.

    Raises:
        UserError: there are none, or one cannot be made.
    """
    if not isinstance(calls, list) or not calls:
        raise UserError(f'row {row_id} has no hidden calls; add a column calls: [["module.function", [2, 3], 5], ...]')
    for call in calls:
        whole = isinstance(call, list) and len(call) in (3, 4)
        if not whole or not isinstance(call[0], str) or "." not in call[0] or not isinstance(call[1], list):
            raise UserError(f'row {row_id} has the call {call!r:.80}; write ["module.function", [arguments], expected]')
        if len(call) == 4:
            _check_options(call[3], f"row {row_id}, call {call[0]}")
    return calls


def _check_options(options: Any, where: str) -> None:
    known = ("items", "tolerance", "seconds")
    if not isinstance(options, dict) or not options or options.keys() - set(known):
        raise UserError(f"{where}: {options!r:.80} are no options of a call; write {{{', '.join(known)}: number}}")
    for name, value in options.items():
        kind = int if name == "items" else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            raise UserError(f"{where}: {name}={value!r:.80} must be a positive number")
    if options.get("items", 0) > MOST_ITEMS:
        raise UserError(f"{where}: items={options['items']} must be at most {MOST_ITEMS}")
