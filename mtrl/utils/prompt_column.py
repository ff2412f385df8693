"""The prompt of a row of data: its column, which holds text, or messages as a list or as the JSON text of one."""

from __future__ import annotations

import json
import re
from typing import Any

from mtrl.errors import UserError
from mtrl.types import ROLES, Message
from mtrl.utils.strict_json import strict_loads

COLUMNS = ("prompt", "question")
"""Names of the column, the preferred one first."""
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")


def prompt_messages(raw: dict[str, Any], row_id: str) -> list[Message]:
    """Return the messages of the prompt of a row.

    Args:
        raw: the row as it was read.

    Raises:
        UserError: the row has no prompt, or one of another form.
    """
    column = next((name for name in COLUMNS if raw.get(name)), None)
    if column is None:
        raise UserError(
            f"row {row_id} of data.path has no prompt; it needs a column {' or '.join(COLUMNS)}, "
            f"and has {', '.join(map(str, raw))}"
        )
    prompt = _parsed(raw[column])
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not are_messages(prompt):
        raise UserError(
            f"row {row_id} of data.path has {column}={str(raw[column])[:60]!r}; write text, or a list of messages "
            "with role and content, which is text or a list of parts such as {'type': 'text', 'text': …}"
        )
    for role in (message["role"] for message in prompt):
        if role not in ROLES:
            raise UserError(
                f"row {row_id} of data.path has a message with role={role[:60]!r} in {column}; write one of "
                f"{', '.join(ROLES)}"
            )
    return [with_argument_objects(_without_none(message), f"row {row_id} of data.path") for message in prompt]


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of one or more messages with role and content: text, a list of parts, or None
    beside calls of tools."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def with_argument_objects(message: Message, where: str) -> Message:
    """Return a message whose calls of tools have objects as arguments, as renderers take them: OpenAI's format has
    their JSON text. Text that holds no object stays as it is. Calls may also have name and arguments as keys of their
    own, as some chat templates take them.

    Args:
        where: place of the message, for the error.

    Raises:
        UserError: `tool_calls` is no list of calls of functions.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [_function(call) for call in calls] if isinstance(calls, list) else [None]
    if not all(functions):
        raise UserError(
            f"{where} has a message with tool_calls={str(calls)[:60]}; write a list of "
            '{"type": "function", "function": {"name": …, "arguments": {…}}}'
        )
    kept = [{k: v for k, v in call.items() if k not in ("name", "arguments")} for call in calls]
    pairs = zip(kept, functions, strict=True)
    return {**message, "tool_calls": [{"type": "function", **call, "function": function} for call, function in pairs]}


def _function(call: Any) -> dict[str, Any] | None:
    """Return name and arguments of a call; None if it is no call of a function."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            found = strict_loads(arguments or "{}")
        except ValueError:
            found = None
        arguments = found if isinstance(found, dict) else arguments
    return {"name": function["name"], "arguments": arguments}


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or "content" not in value:
        return False
    content = value["content"]
    if isinstance(content, list):
        return all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _parsed(prompt: Any) -> Any:
    """Parse messages that are stored as JSON text, as in CSV, which has no lists."""
    if isinstance(prompt, str) and _LIST_OF_OBJECTS.match(prompt):
        try:
            messages = json.loads(prompt)
        except (ValueError, RecursionError):
            return prompt
        return messages if are_messages(messages) else prompt
    return prompt


def _without_none(message: Message) -> Message:
    """Return a message without the keys that Parquet adds to each message, and to each part of its content, because
    others have them; their values are None."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if isinstance(kept["content"], list):
        kept["content"] = [{key: value for key, value in part.items() if value is not None} for part in kept["content"]]
    return kept
