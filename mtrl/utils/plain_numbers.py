"""Conversion of numbers that a user's code returns (rewards, components, metrics and scores) to plain floats.

A number is converted before it is checked, because the methods of a user's own subclass of float may be wrong.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from mtrl.types import LARGEST_REWARD
from mtrl.utils.process_guard import safe_text

LARGEST_METRIC = 1e100
"""Upper bound of a metric's magnitude; means and squares of metrics are computed in float64."""
MOST_NAMES, LONGEST_NAME = 1_000, 200
"""Maximum number of reward components, or of metrics, of one turn, and maximum length of their names in characters.
Each name is a column of the run's files."""


def finite(value: Any, what: str, below: float = LARGEST_REWARD) -> float:
    """Convert a number to a plain float; `what` describes it in the error.

    Raises:
        TypeError: `value` is not a finite number, or its magnitude is not less than `below`.
    """
    number = plain(value)
    if not abs(number) < below:
        raise TypeError(f"{what} {shown(value)}; it must be a finite number below {below:g}")
    return number


def named(values: Mapping[str, Any], what: str, below: float = LARGEST_REWARD) -> dict[str, float]:
    """Check a mapping from names to finite numbers, and convert the numbers to floats.

    Raises:
        TypeError: a value is not a finite number below `below`, there are too many names, or a name is too long.
    """
    check_names(values, what)
    return {name: finite(value, f"{what}[{name!r}] =", below) for name, value in values.items()}


def check_names(values: Mapping[str, Any], what: str) -> None:
    """Check the names of a mapping.

    Raises:
        TypeError: there are too many names, or a name is too long or no text.
    """
    if len(values) > MOST_NAMES:
        raise TypeError(f"{what} with {len(values)} names; there may be {MOST_NAMES}")
    for name in values:
        if not isinstance(name, str) or len(name) > LONGEST_NAME:
            raise TypeError(f"{what} with the name {shown(name)}; it must be text of at most {LONGEST_NAME} characters")


def plain(value: Any) -> float:
    """Convert a value to a plain float; NaN if it is not a real number, or too large for a float."""
    try:
        number = value.item() if hasattr(value, "item") else value  # scalars of numpy and torch
        return float(number) if isinstance(number, numbers.Real) else math.nan
    except (OverflowError, ValueError, RuntimeError):  # for example an array with several elements
        return math.nan


def shown(value: Any) -> str:
    """Return the text of a value for a message, at most 200 characters."""
    return f"{safe_text(value, repr):.200}"
