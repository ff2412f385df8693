"""Fields of the schema that declare which values they take, beside their type and default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T", bound=float | None)
Word = TypeVar("Word", bound=str | None)


@dataclass(frozen=True)
class Bound:
    """Bounds of a number; None: no such bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    why: str = ""
    """Reason that the error message adds in parentheses."""

    def broken_by(self, value: float) -> str | None:
        """Return the bound that a value violates, in words (`at least 1`); None if it violates none."""
        if self.at_least is not None and not value >= self.at_least:
            return f"at least {self.at_least}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}"
        if self.at_most is not None and not value <= self.at_most:
            return f"at most {self.at_most}"
        return f"below {self.below}" if self.below is not None and not value < self.below else None


def number(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    why: str = "",
) -> T:
    """Return a field for a number within bounds (see `Bound`), or for null where the type allows it."""
    return field(default=default, metadata={"bound": Bound(at_least, above, at_most, below, why)})


def one_of(default: Word, *others: str, refused: Mapping[str, str] | None = None) -> Word:
    """Return a field for one of a few words.

    Args:
        default: the default, which is the first word; None is allowed in addition to the words.
        refused: other words that users may expect, each with the rest of the sentence that refuses it.
    """
    words = others if default is None else (default, *others)
    return field(default=default, metadata={"choices": words, "refused": refused or {}})
