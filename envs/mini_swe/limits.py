"""Check of the limits in `environment.config`, which the loader and the environment both read."""

from __future__ import annotations

from typing import Any

from mtrl.errors import UserError


def check_positive(name: str, value: Any, kind: Any) -> None:
    """Raise a UserError if the value of a key of `environment.config` is no positive number of this kind."""
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        raise UserError(f"environment.config.{name}={value!r} must be a positive number")
