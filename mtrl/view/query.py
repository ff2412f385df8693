"""The parsed and checked query string of a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn


class QueryRefusal(Exception):
    """Error answer to a request."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Query:
    """Names and values of a query string. `check` refuses names that the route does not know."""

    def __init__(self, words: Iterable[tuple[str, str]] = ()):
        self._values: dict[str, list[str]] = {}
        for name, value in words:
            self._values.setdefault(name, []).append(value)

    def check(self, known: Iterable[str]) -> None:
        """Check that all names are known.

        Raises:
            Refusal: A name has no effect here.
        """
        for name in self._values.keys() - set(known):
            raise QueryRefusal(400, f"{name!r} is not known here; there is {', '.join(sorted(known))}")

    def all(self, name: str) -> list[str]:
        return self._values.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[-1]

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        if name not in self._values:
            return default
        value = whole(name, self.text(name))
        if not low <= value <= high:
            raise QueryRefusal(400, f"{name}={value} must be from {low} to {high}")
        return value

    def optional(self, name: str) -> int | None:
        return whole(name, self.text(name)) if name in self._values else None

    def choice(self, name: str, known: Sequence[str]) -> str:
        """Return the value of a name, which must be one of `known`; the default is the first of them."""
        value = self.text(name, known[0])
        if value not in known:
            wrong(name, value, f"one of {', '.join(known)}")
        return value


def whole(name: str, text: str) -> int:
    try:
        if len(text) <= 18:
            return int(text)
    except ValueError:
        pass
    wrong(name, text, "a whole number")


def number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else wrong(name, text, "a number")


def flag(name: str, text: str) -> bool:
    return text == "1" if text in ("0", "1") else wrong(name, text, "1 or 0")


def wrong(name: str, text: str, expected: str) -> NoReturn:
    raise QueryRefusal(400, f"{name}={text[:80]} must be {expected}")
