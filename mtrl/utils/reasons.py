"""Texts about an error: one line for the user, and the longer text that a failed episode stores."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import mtrl

LIBRARIES = (Path(mtrl.__file__).parent, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))
"""Folders of mtrl, Python and installed packages; a file outside of them is the user's own code."""


LONGEST_LINE = 1_000
"""Maximum length of the first line of `account`, in characters."""


LONGEST_ACCOUNT = 20_000
"""Maximum length of the text of `account`, in characters."""


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


def account(error: BaseException) -> str:
    """Return the text that a failed episode stores about its error: one line with type and message, then the
    traceback. The text is cut after `LONGEST_ACCOUNT` characters, since an environment chooses the message."""
    from mtrl.utils.process_guard import guarded, safe_text

    first = next(iter(safe_text(error).splitlines()), "")[:LONGEST_LINE]
    with guarded():  # formatting the traceback calls the error's own code too
        trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {first}\n{trace}"
    if len(text) > LONGEST_ACCOUNT:
        text = f"{text[:LONGEST_ACCOUNT]}\n[{len(text) - LONGEST_ACCOUNT} more characters were cut]"
    return text.encode(errors="replace").decode()
