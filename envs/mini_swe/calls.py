"""Hidden calls of a row, and their checks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mtrl.errors import UserError

MOST_ITEMS = 100_000


@dataclass(frozen=True)
class Call:
    """A function, its arguments, and the expected result. The form in a row is `[path, arguments, expected]`,
    optionally with options as a fourth element: `["m.primes", [], [2, 3, 5], {"items": 3}]`."""

    path: str
    """Dotted path of module and function."""
    arguments: list[Any]
    expected: Any
    items: int | None = None
    """Maximum number of items to compare, as a list, of the iterator that the call returns; None if the result is no
    iterator."""
    tolerance: float | None = None
    """Allowed error of a number if a float is expected; relative if the expected number is above 1, else absolute."""
    seconds: float | None = None
    """Time limit of this call alone, in seconds of wall time, including the start of Python and the import."""

    @classmethod
    def of(cls, call: Sequence[Any]) -> Call:
        """Build the call from a row that `check_calls` has checked."""
        path, arguments, expected, *options = call
        return cls(path, arguments, expected, **(options[0] if options else {}))


def check_calls(calls: Any, row_id: str) -> list[list[Any]]:
    """Check the calls of a row, and return them unchanged.

    Raises:
        UserError: the row has no calls, or a call is malformed.
    """
    if not isinstance(calls, list) or not calls:
        raise UserError(f'row {row_id} has no hidden calls; add a column calls: [["module.function", [2, 3], 5], ...]')
    for call in calls:
        whole = isinstance(call, list) and len(call) in (3, 4)
        if not whole or not isinstance(call[0], str) or "." not in call[0] or not isinstance(call[1], list):
            raise UserError(f'row {row_id} has the call {call!r:.80}; write ["module.function", [arguments], expected]')
        try:
            json.dumps(call[:3], allow_nan=False)
        except ValueError:
            raise UserError(
                f"row {row_id}, call {call[0]}: NaN and infinite numbers cannot be compared; leave the call out"
            ) from None
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
