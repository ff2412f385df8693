"""Functions of components whose parameters are checked before the first episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_CHECK = "check_component"


def checked_by(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator for a function that is used as a component. `check(**parameters)` is called before the first episode,
    and raises a `UserError` if the parameters are wrong."""

    def mark(function: F) -> F:
        setattr(function, _CHECK, check)
        return function

    return mark


def check_parameters(function: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Check the parameters of a function that `checked_by` marks.

    Raises:
        UserError: a parameter is wrong.
    """
    if (check := getattr(function, _CHECK, None)) is not None:
        check(**parameters)
