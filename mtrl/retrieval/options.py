"""Checks of options that a configuration gives by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mtrl.errors import UserError


def checked(what: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, if `function` takes them all. Only parameters with a default are options.

    Raises:
        UserError: an option does not exist.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options  # the function checks them itself
    allowed = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    if unknown := sorted(options.keys() - set(allowed)):
        raise UserError(f"{what} has no option {unknown[0]!r}; it has {', '.join(allowed)}")
    return options
