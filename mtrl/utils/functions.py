"""Import of a function that a config key names by its dotted path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mtrl.errors import UserError
from mtrl.utils.reasons import reason


def load_function(path: str, key: str) -> Callable[..., Any]:
    """Return the callable at a dotted path; `key` is the config key for error messages.

    Raises:
        UserError: the path cannot be imported or is not callable, or the module itself raised a `UserError`.
    """
    from mtrl.utils.process_guard import import_guarded  # imports asyncio, which --help does not need

    module, _, attribute = path.rpartition(".")
    try:
        function = getattr(import_guarded(module), attribute)
    except UserError:  # its message already names the problem
        raise
    except Exception as error:  # the module is the user's: importing it can fail in any way
        expected = isinstance(error, ImportError | AttributeError | ValueError)
        said = error if expected else reason(error)
        raise UserError(f"{key}={path} cannot be imported ({said}); write package.module.function") from error
    if not callable(function):
        raise UserError(f"{key}={path} is a {type(function).__name__}; it must be a function")
    return function
