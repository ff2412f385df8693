"""The rules in the order in which they are walked (R154): what has to hold first, the five rules, the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrl.diagnose.finding import Finding
from mtrl.diagnose.record import Record

LEAST = 10
"""Steps of a window, for the question whether there are enough."""

Check = Callable[[Record], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One symptom."""

    name: str
    requirements: tuple[str, ...]
    summary: str
    """What it looks for, in a few words."""
    check: Check
    windows: float
    """It decides after so many windows of steps; before that it is too early to tell."""

    def is_due(self, record: Record) -> bool:
        return record.steps >= self.windows * max(record.window, LEAST)


RULES: list[Rule] = []
"""In the order of `mtrl/diagnose/rules/__init__.py`."""


def rule(*requirements: str, windows: float = 1.0) -> Callable[[Check], Check]:
    """Register a function `record -> Finding | None`, named as the symptom; the first line of its docstring tells it.

    Args:
        requirements: the numbers that it answers, such as "R148".
        windows: windows of steps that it needs before it can decide.
    """

    def register(check: Check) -> Check:
        summary = (check.__doc__ or "").strip().split("\n")[0].rstrip(".")
        RULES.append(Rule(check.__name__, requirements, summary, check, windows))
        return check

    return register
