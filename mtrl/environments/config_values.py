"""Checks of the values of `environment.config`, which the loaders and the environments of tasks share."""

from __future__ import annotations

import math
from typing import Any

from mtrl.errors import UserError


def check_count(key: str, value: Any, low: int = 1, high: int | None = None) -> None:
    """Raise a UserError if the value of `environment.config.KEY` is no whole number from `low` to `high`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UserError(f"environment.config.{key}={value!r} must be a whole number {bounds}")


def check_positive(key: str, value: Any) -> None:
    """Raise a UserError if the value of `environment.config.KEY` is no finite number above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise UserError(f"environment.config.{key}={value!r} must be a number above 0")
