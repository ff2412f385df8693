"""Options by name, as they come from a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from mtrl.errors import UserError


def checked(what: str, function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options, if `function` has them all; its first parameter is no option unless it has a default.

    Raises:
        UserError: one does not exist.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return options  # it checks them itself
    allowed = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    if unknown := sorted(options.keys() - set(allowed)):
        raise UserError(f"{what} has no option {unknown[0]!r}; it has {', '.join(allowed)}")
    return options
