"""Bugs: a function of the table, one mutation that its hidden calls detect, and the edit that reverts it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

from envs.mini_swe.functions import EXPRESSIONS, NAMINGS, Function, arguments, make, outcomes, place
from envs.mini_swe.mutations import mutants

HELD_OUT = 8
"""Number of pairs (function, mutation) of which one is held out, on average."""
_TOKEN = re.compile(r"\s*(?:\w+|\*\*|//|[<>=!]=|\S)")
"""Pattern of a token with the space before it, so that it is the same token in the file and in the edit."""


@dataclass(frozen=True)
class Bug:
    """A broken function as it is written in a file. Its fields are JSON values, so that a row can hold it."""

    name: str
    wrong: str
    """The mutated expression, with the parameter names of the table."""
    naming: int
    """Index of the naming of its parameters."""

    @property
    def key(self) -> str:
        """Key that identifies function and mutation."""
        return f"{self.name}: {self.wrong}"

    @property
    def broken(self) -> Function:
        return make(self.name, self.wrong, NAMINGS[place(self.name)][self.naming])

    @property
    def fixed(self) -> Function:
        return make(self.name, EXPRESSIONS[self.name], NAMINGS[place(self.name)][self.naming])

    def example(self, number: int) -> tuple[tuple[Any, ...], str, str]:
        """Return one of the failing hidden calls: arguments, actual result (or name of an exception), expected
        result."""
        wrong, right = outcomes(self.name, self.wrong), outcomes(self.name, EXPRESSIONS[self.name])
        noticed = [n for n in range(len(right)) if wrong[n] != right[n]]
        chosen = noticed[number % len(noticed)]
        return arguments(self.name)[chosen], wrong[chosen], right[chosen]


@lru_cache(maxsize=1)
def pairs() -> tuple[tuple[str, str], ...]:
    """Return every pair (function, mutation) in which the mutation changes the result of at least one hidden call."""
    return tuple(
        (name, wrong)
        for name, right in EXPRESSIONS.items()
        for wrong in mutants(right)
        if outcomes(name, wrong) != outcomes(name, right)
    )


def is_held_out(key: str) -> bool:
    """Whether the pair of function and mutation belongs to the test split. This does not depend on the seed."""
    return sha256(key.encode()).digest()[0] % HELD_OUT == 0


def edit(broken: str, fixed: str) -> tuple[str, str]:
    """Return the shortest run of tokens to replace in the line `broken`, and the replacement that gives the line
    `fixed`.

    The run is extended to the left until its first occurrence in the line is the right one.
    """
    old, new = _TOKEN.findall(broken), _TOKEN.findall(fixed)
    start = next(n for n, pair in enumerate(zip([*old, None], [*new, None], strict=False)) if pair[0] != pair[1])
    after = 0
    while after < min(len(old), len(new)) - start and old[-1 - after] == new[-1 - after]:
        after += 1
    if start + after == len(old) and after:  # a pure insertion needs the following token
        after -= 1
    ends = len(old) - after, len(new) - after
    while True:
        found = "".join(old[start : ends[0]])
        if found and broken.index(found) == len("".join(old[:start])):
            return found, "".join(new[start : ends[1]])
        start -= 1


def sed(old: str, new: str) -> str:
    """Return the sed command that replaces one text by another."""
    pattern, replacement = re.sub(r"([.*^$[\\])", r"\\\1", old), re.sub(r"([&\\])", r"\\\1", new)
    return f"s|{pattern}|{replacement}|"
