"""Numbers that a user's code returns, as plain floats: rewards, components, metrics and scores.

A number is judged by the float that it becomes, never by its own methods: a subclass of float may say anything of its
magnitude.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from mtrl.process_guard import said
from mtrl.types import LARGEST_REWARD

LARGEST_METRIC = 1e100
"""Magnitude; means and squares of metrics are float64."""
MOST_NAMES, LONGEST_NAME = 1_000, 200
"""Components, or metrics, of one turn, and characters of their names: each is a column of the run's files."""


def finite(value: Any, what: str, below: float = LARGEST_REWARD) -> float:
    """A plain float.

    Raises:
        TypeError: `what` is no finite number, or its magnitude is not below the limit.
    """
    number = plain(value)
    if not abs(number) < below:
        raise TypeError(f"{what} {shown(value)}; it must be a finite number below {below:g}")
    return number


def named(values: Mapping[str, Any], what: str, below: float = LARGEST_REWARD) -> dict[str, float]:
    """Finite numbers by name.

    Raises:
        TypeError: one is none, or there are too many names, or too long ones.
    """
    check_names(values, what)
    return {name: finite(value, f"{what}[{name!r}] =", below) for name, value in values.items()}


def check_names(values: Mapping[str, Any], what: str) -> None:
    """
    Raises:
        TypeError: there are too many names, too long ones, or one that is no text.
    """
    if len(values) > MOST_NAMES:
        raise TypeError(f"{what} with {len(values)} names; there may be {MOST_NAMES}")
    for name in values:
        if not isinstance(name, str) or len(name) > LONGEST_NAME:
            raise TypeError(f"{what} with the name {shown(name)}; it must be text of at most {LONGEST_NAME} characters")


def plain(value: Any) -> float:
    """The value as a plain float; NaN where it is no real number, or too large for a float."""
    try:
        number = value.item() if hasattr(value, "item") else value  # numpy's and torch's
        return float(number) if isinstance(number, numbers.Real) else math.nan
    except (OverflowError, ValueError, RuntimeError):  # an array with several elements, for one
        return math.nan


def shown(value: Any) -> str:
    """The value in a message."""
    return f"{said(value, repr):.200}"
