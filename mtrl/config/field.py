"""Fields of the schema, which declare everything about a key besides its type: default, bounds, words and readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T", bound=float | None)
Word = TypeVar("Word", bound=str | None)
Readers = Mapping[str, tuple[str, ...]]
"""Name of another key of the same section -> its words with which a key is read; one matching word is enough."""

FINITE = "a finite number"
"""Words for what an infinite number violates."""


@dataclass(frozen=True)
class Bound:
    """Bounds of a number; None: no such bound. A number is finite unless `may_be_infinite`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    why: str = ""
    """Reason that the error message adds in parentheses."""
    may_be_infinite: bool = False
    """Whether infinity is a value, which leaves out the limit that the number sets."""

    def broken_by(self, value: float) -> str | None:
        """Return what a value violates, in words (`at least 1`, `a finite number`); None if it violates nothing."""
        if self.at_least is not None and not value >= self.at_least:
            return f"at least {self.at_least}"
        if self.above is not None and not value > self.above:
            return f"above {self.above}"
        if self.at_most is not None and not value <= self.at_most:
            return f"at most {self.at_most}"
        if self.below is not None and not value < self.below:
            return f"below {self.below}"
        return None if self.may_be_infinite or math.isfinite(value) else FINITE


def number(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    why: str = "",
    may_be_infinite: bool = False,
    **more: Any,
) -> T:
    """Return a field for a number within bounds (see `Bound`), or for null where the type allows it.

    Args:
        more: the other arguments of `setting`.
    """
    return setting(default, bound=Bound(at_least, above, at_most, below, why, may_be_infinite), **more)


def one_of(default: Word, *others: str, refused: Mapping[str, str] | None = None, **more: Any) -> Word:
    """Return a field for one of a few words.

    Args:
        default: the default, which is the first word; None is allowed in addition to the words.
        refused: other words that users may expect, each with the rest of the sentence that refuses it.
        more: the other arguments of `setting`.
    """
    words = others if default is None else (default, *others)
    return setting(default, choices=words, refused=refused or {}, **more)


def function(default: str, *others: str, aliases: Mapping[str, str] | None = None) -> str:
    """Return a field for the name of a function in a registry, or the path of a user's own function.

    Args:
        default, others: the names of mtrl's own functions, written here because the registries import torch. A test
            compares them with the registries.
        aliases: alias -> name.
    """
    return setting(default, functions=(default, *others, *(aliases or {})), aliases=aliases or {})


def setting(
    default: Any = None,
    *,
    factory: Callable[[], Any] | None = None,
    read_with: Readers | None = None,
    program: str = "",
    affects_policy: bool = True,
    **checked: Any,
) -> Any:
    """Return a field with the properties of a key or a section.

    Args:
        factory: makes the default, in place of `default`; for sections and lists.
        read_with: see `Readers`; other words of those keys leave this key without an effect, and a change of it warns.
        program: the one command that reads the key, such as `mtrl evaluate`; empty: training reads it.
        affects_policy: whether the key has an effect on the policy that a run trains.
        checked: bound, words and functions, from `number`, `one_of` and `function`.
    """
    if read_with is not None:
        checked["read_with"] = read_with
    if program:
        checked["program"] = program
    if program or not affects_policy:
        checked["affects_policy"] = False
    return field(metadata=checked, **({"default": default} if factory is None else {"default_factory": factory}))
