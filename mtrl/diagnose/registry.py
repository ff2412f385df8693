"""The registry of the rules, in the order in which they are checked (R154): prerequisites, the five rules, the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtrl.diagnose.finding import Finding
from mtrl.diagnose.record import Record

LEAST = 10
"""Minimum length of a window, in steps, for the decision whether a rule has enough steps."""

Check = Callable[[Record], Finding | None]


@dataclass(frozen=True)
class Rule:
    """The rule for one symptom."""

    name: str
    requirements: tuple[str, ...]
    summary: str
    """The symptom in one sentence."""
    check: Check
    windows: float
    """Number of windows of steps that the rule needs before it can decide."""

    def is_due(self, record: Record) -> bool:
        return record.steps >= self.windows * max(record.window, LEAST)


RULES: list[Rule] = []
"""All rules, in the order of `mtrl/diagnose/rules/__init__.py`."""


def rule(*requirements: str, windows: float = 1.0) -> Callable[[Check], Check]:
    """Register a function `record -> Finding | None`. Its name is the name of the symptom, and the first line of its
    docstring describes the symptom.

    Args:
        requirements: Numbers of the requirements that the rule covers, such as "R148".
        windows: Number of windows of steps that the rule needs before it can decide.
    """

    def register(check: Check) -> Check:
        summary = (check.__doc__ or "").strip().split("\n")[0].rstrip(".")
        RULES.append(Rule(check.__name__, requirements, summary, check, windows))
        return check

    return register
