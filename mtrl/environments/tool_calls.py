"""Tool calls in messages, and their text form for models whose renderer supports no other form.

A message holds its calls in OpenAI's form, including malformed ones, in the order in which they were sampled::

    {"role": "assistant", "content": "…", "tool_calls": [
        {"type": "function", "id": "call_0_0", "function": {"name": "look", "arguments": {"at": "x"}}},
        {"type": "function", "id": "call_0_1", "function": {"name": "", "arguments": "{oops"},
         "malformed": "invalid_json"},
    ]}

The text form is that of Hermes (https://github.com/NousResearch/Hermes-Function-Calling):
`<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mtrl.types import Message
from mtrl.utils.images import content_text
from mtrl.utils.strict_json import check_depth, strict_loads

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")

PROBLEMS = {
    "invalid_json": "the tool call is not valid JSON",
    "unclosed_block": "the tool call is not closed",
    "missing_name": "the tool call names no tool",
    "malformed_structure": "the tool call does not have the expected form",
}
"""Error text for a malformed call, by its `renderers.base.ToolCallParseStatus`."""


class TextCall(NamedTuple):
    """One attempt to call a tool; the fields of `renderers.base.ParsedToolCall`."""

    raw: str
    name: str | None = None
    arguments: dict[str, Any] | None = None
    status: str = "ok"
    id: str | None = None


def parse_calls(text: str) -> tuple[str, list[TextCall]]:
    """Return the text without calls, and every attempt at a call, in order. No attempt is repaired or left out."""
    words: list[str] = []
    calls: list[TextCall] = []
    read = 0  # an index, because copies of the rest would take quadratic time for many tags
    for tag in _TAG.finditer(text):
        if tag.start() < read:  # an opening within a call
            continue
        if tag[0] == CLOSE:  # closed, and never opened
            calls.append(TextCall(text[read : tag.start()], status="malformed_structure"))
            read = tag.end()
            continue
        words.append(text[read : tag.start()])
        close = text.find(CLOSE, tag.end())
        if close < 0:
            calls.append(TextCall(text[tag.end() :], status="unclosed_block"))
            return "".join(words), calls
        calls.append(_parse_call(text[tag.end() : close]))
        read = close + len(CLOSE)
    return "".join([*words, text[read:]]), calls


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call in the text form that `parse_calls` reads."""
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}{CLOSE}"


def text_of(message: Message) -> str:
    """Return a message as text. Calls that its content does not contain are appended."""
    content = content_text(message.get("content"))
    if OPEN in content or CLOSE in content:
        return content
    functions = (call["function"] for call in message.get("tool_calls") or ())
    return content + "".join(
        format_call(f["name"], f["arguments"]) if isinstance(f["arguments"], dict) else f"{OPEN}{f['arguments']}{CLOSE}"
        for f in functions
    )


def message_calls(attempts: Iterable[Any], turn: int) -> list[dict[str, Any]]:
    """Convert parsed calls (`TextCall`, or those of `renderers`) to the form that a message holds.

    A call without an id of the model gets the id `call_<turn>_<place>`. A malformed call has its raw text as arguments.
    """
    return [_message_call(attempt, f"call_{turn}_{place}") for place, attempt in enumerate(attempts)]


def describe_tools(schemas: Sequence[dict[str, Any]]) -> str:
    """Describe the tools and their text form, for the prompt of a model whose template shows no tools."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You can call tools. These are their signatures:\n<tools>\n{lines}\n</tools>\n"
        f"Write each call as one JSON object with the keys name and arguments:\n"
        f'{OPEN}{{"name": "<tool>", "arguments": {{"<parameter>": "<value>"}}}}{CLOSE}'
    )


def _parse_call(raw: str) -> TextCall:
    try:
        body = strict_loads(raw)
    except ValueError:
        return TextCall(raw, status="invalid_json")
    if not isinstance(body, dict) or not isinstance(body.get("arguments"), dict) or set(body) - {"name", "arguments"}:
        return TextCall(raw, status="malformed_structure")
    if not isinstance(body.get("name"), str) or not body["name"]:
        return TextCall(raw, status="missing_name")
    return TextCall(raw, body["name"], body["arguments"])


def _message_call(attempt: Any, call_id: str) -> dict[str, Any]:
    status = str(getattr(attempt, "status", "ok"))
    name, arguments = attempt.name, attempt.arguments
    if status not in PROBLEMS and not (isinstance(name, str) and name):
        status = "missing_name"
    try:
        function = _plain({"name": name, "arguments": {} if arguments is None else arguments})
    except (ValueError, RecursionError):  # NaN, or nested too deep: the parsers of `renderers` accept both
        status = "invalid_json"
    call = {"type": "function", "id": getattr(attempt, "id", None) or call_id}
    if status not in PROBLEMS:
        return {**call, "function": function}
    raw = {"name": name if isinstance(name, str) else "", "arguments": str(getattr(attempt, "raw", ""))}
    return {**call, "function": _plain(raw), "malformed": status}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """Convert a value to plain JSON for any file: lone surrogates, as in `"\\ud800"`, become question marks."""
    check_depth(value)
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace"))
