"""Size limit of observations: they are encoded on the event loop, which must not block, and written to files."""

from __future__ import annotations

from typing import Any

from mtrl.types import Message

LARGEST = 1_000_000
"""Maximum size of one observation with all of its messages, in characters."""
COST = 16
"""Characters charged for every JSON value besides its text, so that a million empty lists are too large as well."""


def bounded(messages: list[Message]) -> list[Message]:
    """Cut the messages to at most `LARGEST` characters in total; a note in the text reports each cut.

    The model can determine the number of messages, because one turn can make thousands of calls. Messages beyond the
    limit are left out.

    Raises:
        TypeError: in a single message, the values other than a text `content` exceed the limit, or are nested without
            an end.
    """
    left = LARGEST
    result: list[Message] = []
    for number, message in enumerate(messages):
        size = _size({key: value for key, value in message.items() if not _is_text(key, value)})
        if size > left:
            note = f"{len(messages) - number} more messages were cut"
            return [*result[:-1], _noted(result[-1], note)] if result else []
        left -= size
        if _is_text("content", content := message["content"]):
            if len(content) > left:
                message = _noted(
                    {**message, "content": content[:left]}, f"{len(content) - left} more characters were cut"
                )
            left = max(0, left - len(content))
        result.append(message)
    return result


def _noted(message: Message, note: str) -> Message:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": f"\n[{note}]"}]}
    return {**message, "content": f"{content}\n[{note}]"} if _is_text("content", content) else message


def _is_text(key: Any, value: Any) -> bool:
    return key == "content" and isinstance(value, str)


def _size(value: Any) -> int:
    """Return the size of a JSON value in characters, with `COST` added for each value in it."""
    size, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        size += len(value) + COST if isinstance(value, str | dict | list | tuple) else COST
        if size > LARGEST:
            raise TypeError(
                f"the observation is larger than {LARGEST:,} characters in what is no text; return less of it"
            )
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
    return size
