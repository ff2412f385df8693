"""Fields of a request's body: each function returns a checked value, or refuses it by the name of its field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtrl.gateway.exchange import RequestError
from mtrl.utils.strict_json import check_depth, strict_loads

MAX_STOP_STRINGS = 16
"""Maximum number of stop strings of a request. OpenAI takes 4, servers of open models take more."""
TEXTS = ("text", "input_text", "output_text", "refusal")
"""Types of the parts of a message that hold text."""
REASONING = ("thinking", "redacted_thinking", "reasoning")
"""Types of the parts of earlier answers that some clients send back; the calls that they continue hold the tokens."""


def bad(param: str, what: str) -> RequestError:
    return RequestError(400, f"{param} {what}", param=param)


def shown(value: Any) -> str:
    """Return the beginning of the `repr` of a value that a client sent."""
    try:
        return f"{value!r:.50}"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"


def as_object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object; send one with a model and messages or a prompt")
    return dict(body)


def text(value: str) -> str:
    """Replace lone surrogates by question marks: neither a file nor a tokenizer accepts them."""
    return value if value.isascii() else value.encode(errors="replace").decode()


def typed(body: dict[str, Any], name: str, kind: type, form: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise bad(name, f"is {shown(value)}; it must be {form}")
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    return bool(typed(body, name, bool, "true or false"))


def whole(body: dict[str, Any], name: str, maximum: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (maximum is not None and value > maximum):
        upto = "" if maximum is None else f" and at most {maximum}"
        raise bad(name, f"is {shown(value)}; it must be a whole number of at least 1{upto}")
    return value


def number(body: dict[str, Any], name: str, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= maximum:
        raise bad(name, f"is {shown(value)}; it must be a number from 0 to {maximum:g}")
    return float(value)


def stop_strings(body: dict[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) and item for item in texts):
        raise bad(name, f"is {shown(value)}; it must be a text or a list of texts, none of them empty")
    if len(texts) > MAX_STOP_STRINGS:
        raise bad(name, f"has {len(texts)} texts; at most {MAX_STOP_STRINGS} are accepted")
    return tuple(dict.fromkeys(text(item) for item in texts))


def plain(param: str, value: Any) -> Any:
    """Return a copy in plain JSON, with lone surrogates replaced, that can be written to any file."""
    try:
        check_depth(value)
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise bad(param, f"is not plain JSON ({error})") from None


def refuse(body: dict[str, Any], without_effect: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that would change the answer.

    Args:
        without_effect: accepted values of each such field, besides null, which have no effect.

    Raises:
        RequestError: 400; it names the field.
    """
    for name, allowed in without_effect.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            raise bad(name, f"is {shown(value)}, which is not supported here; remove it")


def content(where: str, value: Any, joint: str = "") -> str:
    """Return the text of a message: a text, or a list of parts that are joined by `joint`."""
    if value is None or isinstance(value, str):
        return text(value or "")
    if not isinstance(value, list):
        raise bad(where, f"is {shown(value)}; it must be a text or a list of parts")
    parts = [part_text(f"{where}[{index}]", part) for index, part in enumerate(value)]
    return joint.join(part for part in parts if part is not None)


def part_text(where: str, part: Any) -> str | None:
    """Return the text of a part of a message; None for reasoning."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in REASONING:
        return None
    found = part.get("refusal" if kind == "refusal" else "text") if kind in TEXTS else part
    if not isinstance(found, str):
        raise bad(where, f"is a part of the type {shown(kind)}; the model reads only text")
    return text(found)


def arguments(where: str, value: Any) -> Any:
    """Return the arguments of a call as an object. Text that holds no object stays text, because a model may have
    sampled it."""
    if isinstance(value, str):
        try:
            found = plain(where, strict_loads(value or "{}"))
        except (ValueError, RequestError):
            return text(value)
        return found if isinstance(found, dict) else text(value)
    if value is None or isinstance(value, dict):
        return plain(where, value or {})
    raise bad(where, f"is {shown(value)}; it must be an object as JSON text")


def call(name: str, call_id: Any, values: Any) -> dict[str, Any]:
    """Return a call of a tool in the form of `Message`; `values` are its checked arguments."""
    known_id = text(call_id) if isinstance(call_id, str) else ""
    return {"type": "function", "id": known_id, "function": {"name": text(name), "arguments": values}}


def function(where: str, name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form that chat templates take, which is that of OpenAI's chat completions."""
    described = {"description": description} if isinstance(description, str) else {}
    schema = parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": plain(where, {"name": name, **described, "parameters": schema})}
