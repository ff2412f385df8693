"""Strict parsing of JSON: ambiguous or malformed JSON that a model wrote is an error, and so is text in data that is no
text. Nothing is repaired."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

DEEPEST = 100
"""Maximum nesting depth, in levels. The parser accepts far more, but Python's `copy` and dataclasses fail on them."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def strict_loads(text: str) -> Any:
    """Parse one JSON value.

    Raises:
        ValueError: the text is not JSON, repeats a key, has a number that JSON does not have (NaN), or is nested too
            deep.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_repeats, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    check_depth(value)
    return value


def loads_text(text: str) -> Any:
    """Parse one JSON value, all of whose texts can be written to a file and given to a tokenizer.

    Raises:
        ValueError: the text is not JSON, or it holds half of a surrogate pair, such as `"\\ud800"`.
        RecursionError: the value is nested too deep.
    """
    value = json.loads(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise ValueError(f"{half} is half of a surrogate pair and no character") from None
    return value


def check_depth(value: Any) -> None:
    """Check the nesting depth of a parsed JSON value.

    Raises:
        ValueError: lists and objects are nested deeper than `DEEPEST`.
    """
    level = [value]
    for _ in range(DEEPEST):
        level = [item for outer in level for item in _items(outer)]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError("nested too deep")


def canonical(value: Any) -> str:
    """Return the canonical text of a JSON value: keys sorted, no spaces, and 1.0 written as 1.

    Raises:
        ValueError, TypeError: the value is not JSON.
    """
    plain = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    return json.dumps(_whole(value), **plain)  # type: ignore[arg-type]


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value
