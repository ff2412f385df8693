"""Code of the user: the import of a function that a config key names, and texts about the errors of such code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtrl
from mtrl.errors import UserError

LIBRARIES = (Path(mtrl.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
"""Folders of mtrl, Python and installed packages; a file outside of them is the user's own code."""
LONGEST_LINE = 1_000
"""Maximum length of the first line of `error_text`, in characters."""
LONGEST_ERROR_TEXT = 20_000
"""Maximum length of the text of `error_text`, in characters."""


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
        detail = error if expected else reason(error)
        raise UserError(f"{key}={path} cannot be imported ({detail}); write package.module.function") from error
    if not callable(function):
        raise UserError(f"{key}={path} is a {type(function).__name__}; it must be a function")
    return function


def reason(error: BaseException) -> str:
    """Return one line with the error and its place in the user's own code: `KeyError in vault.py, line 9: 'tag'`."""
    from mtrl.utils.process_guard import safe_text  # imports asyncio, which --help does not need

    line = next(iter(safe_text(error).splitlines()), "")
    if isinstance(error, ImportError | SyntaxError):
        return line  # the message names the place itself
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(library in file.parents for library in LIBRARIES):
            return f"{type(error).__name__} in {file.name}, line {frame.lineno}: {line}"
    return f"{type(error).__name__}: {line}"


def error_text(error: BaseException) -> str:
    """Return the text that a failed episode stores about its error: one line with type and message, then the
    traceback. The text is cut after `LONGEST_ERROR_TEXT` characters, since an environment chooses the message."""
    from mtrl.utils.process_guard import guarded, safe_text

    first = next(iter(safe_text(error).splitlines()), "")[:LONGEST_LINE]
    with guarded():  # formatting the traceback calls the error's own code too
        trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {first}\n{trace}"
    if len(text) > LONGEST_ERROR_TEXT:
        text = f"{text[:LONGEST_ERROR_TEXT]}\n[{len(text) - LONGEST_ERROR_TEXT} more characters were cut]"
    return text.encode(errors="replace").decode()
