"""How large an observation may be: it is encoded on the event loop, which nothing may hold, and written to files."""

from __future__ import annotations

from typing import Any

from mtrl.types import Message

LARGEST = 1_000_000
"""Characters of one observation, with all of its messages."""
COST = 16
"""Characters that every value counts at least, so that a million empty lists are too large as well."""


def bounded(messages: list[Message]) -> list[Message]:
    """The messages, their texts cut so that all together have at most `LARGEST` characters; a cut text says so.

    Raises:
        TypeError: what is not `content` in text is larger than that, or nested without an end.
    """
    left = LARGEST
    for message in messages:
        left = _left(left, {key: value for key, value in message.items() if not _is_text(key, value)})
    kept: list[Message] = []
    for message in messages:
        if _is_text("content", content := message["content"]) and len(content) > left:
            message = {**message, "content": f"{content[:left]}\n[{len(content) - left} more characters were cut]"}
            left = 0
        elif _is_text("content", content):
            left -= len(content)
        kept.append(message)
    return kept


def _is_text(key: Any, value: Any) -> bool:
    return key == "content" and isinstance(value, str)


def _left(left: int, value: Any) -> int:
    """What is left of so many characters after a JSON value; the walk ends where nothing is."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        left -= len(value) + COST if isinstance(value, str | dict | list | tuple) else COST
        if left < 0:
            raise TypeError(
                f"the observation is larger than {LARGEST:,} characters in what is no text; return less of it"
            )
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return left
