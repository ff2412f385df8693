"""Names and texts in the form that MLflow accepts."""

from __future__ import annotations

import math
import posixpath
import re
from typing import Any

from mtrl.utils.text import clean

LONGEST_NAME = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 8000
LONGEST_TEXT = 20_000
"""Maximum length of one text in a trace, in characters. A longer text loses its middle."""
DEEPEST = 32
_UNSAFE = re.compile(r"\.(?=x[0-9a-f]+(?:\.|[^A-Za-z0-9_\-. /]))|[^A-Za-z0-9_\-. /]")
_ESCAPED = re.compile(r"\.x([0-9a-f]+)\.")


def safe_name(name: str) -> str:
    """Return the name of a metric in MLflow. Characters that MLflow refuses are escaped: `@` becomes `.x40.`.

    `plain_name` reverses it, except for names of more than 250 characters, which are cut.
    """
    safe = _UNSAFE.sub(_code, name)
    if posixpath.normpath(safe) != safe or safe.startswith(("..", "/")) or safe == ".":
        safe = re.sub(r"[^A-Za-z0-9_\- ]", _code, name)
    return safe[:LONGEST_NAME]


def plain_name(safe: str) -> str:
    """Return the name from which `safe_name` made `safe`."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), safe)


def _code(found: re.Match[str]) -> str:
    return f".x{ord(found[0]):x}."


def short_text(text: Any, longest: int) -> str:
    """Return a parameter, a tag or a preview as clean text, cut at its end to `longest` characters."""
    cleaned = clean(str(text))
    return cleaned if len(cleaned) <= longest else f"{cleaned[: longest - 1]}…"


def presentable(value: Any, whole: str, depth: int = 0) -> Any:
    """Convert a message to JSON that every database accepts: long texts lose their middle, and half surrogate pairs are
    escaped.

    Args:
        whole: Location of the whole text, which a cut text names.
    """
    if isinstance(value, str):
        return _presentable_text(value, whole)
    if depth >= DEEPEST and isinstance(value, dict | list | tuple):
        return f"… nested deeper than {DEEPEST}; the whole is in {whole} …"
    if isinstance(value, dict):
        return {_presentable_text(str(k), whole): presentable(v, whole, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [presentable(item, whole, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN
    return value if value is None or isinstance(value, bool | int | float) else _presentable_text(str(value), whole)


def _presentable_text(text: str, whole: str) -> str:
    if len(text) > LONGEST_TEXT:
        half, left_out = LONGEST_TEXT // 2, len(text) - LONGEST_TEXT
        text = f"{text[:half]}\n… {left_out:,} characters left out; the whole is in {whole} …\n{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\0")
