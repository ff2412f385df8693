"""Fields of the schema that state which values they take, beside their type and default."""

from __future__ import annotations

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
    between: tuple[float, float] | None = None
    """Both ends are excluded."""
    why: str = ""
    """Reason that the error message adds in parentheses."""

    def broken_by(self, value: float) -> str | None:
        """Return the bound that a value violates, in words (`at least 1`); None if it violates none."""
        if self.at_least is not None and not value >= self.at_least:
            return f"at least {self.at_least}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}"
        if self.between is not None and not self.between[0] < value < self.between[1]:
            return f"between {self.between[0]} and {self.between[1]}"
        return f"at most {self.at_most}" if self.at_most is not None and not value <= self.at_most else None


def number(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    between: tuple[float, float] | None = None,
    why: str = "",
) -> T:
    """Return a field for a number within bounds (see `Bound`), or for null where the type allows it."""
    return field(default=default, metadata={"bound": Bound(at_least, above, at_most, between, why)})


def one_of(default: Word, *others: str) -> Word:
    """Return a field for one of a few words. The first is the default; None as the default is not one of the words."""
    words = others if default is None else (default, *others)
    return field(default=default, metadata={"choices": words})
