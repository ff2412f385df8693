"""The wire form of a chat API: the request and the answer of a turn, and conversions from and to messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mtrl.environments.tool_calls import OPEN, TextCall, text_of
from mtrl.types import Generation, Message
from mtrl.utils.strict_json import strict_loads

NAMELESS = "unknown"
"""Function name sent for a call in which the model gave no name: APIs refuse calls without one."""


@dataclass(frozen=True)
class ChatPrompt:
    """Request to an endpoint: OpenAI's `messages`, and `tools` if the environment has any."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ChatGeneration(Generation):
    """A turn that an endpoint answered. Its ids and log-probs are empty."""

    content: str = ""
    reasoning: str | None = None
    calls: list[TextCall] = field(default_factory=list)
    """Tool calls that the API itself parsed, including malformed ones."""
    usage: dict[str, float] = field(default_factory=dict)
    """Entries for `Turn.metrics`: `prompt_tokens`, `completion_tokens`, `cached_tokens`, `retries`."""
    is_full: bool = False
    """Whether the server reported that the context has no room for another token."""


def to_wire(messages: list[Message]) -> list[Message]:
    """Return the messages in the form that OpenAI's API takes.

    The API takes arguments as JSON text, a tool result must name a call of the assistant, and unknown keys may be
    refused. Unknown keys and the reasoning of past turns are therefore not sent. Calls in the text form, and calls of a
    message of which one has no id, are sent as text. A tool result that answers such a call, or no call, is sent as a
    user message.
    """
    wire: list[Message] = []
    called: set[str] = set()
    for message in messages:
        role, content = message["role"], message.get("content")
        content = content if isinstance(content, str | list) else "" if content is None else json.dumps(content)
        content = [_part_to_wire(part) for part in content] if isinstance(content, list) else content
        sent: Message = {"role": role, "content": content}
        calls = message.get("tool_calls") or []
        if role == "assistant" and not all(isinstance(call.get("id"), str) for call in calls):
            sent["content"] = text_of(message)
        elif role == "assistant" and calls and not (isinstance(content, str) and OPEN in content):
            sent["tool_calls"] = [_call_to_wire(call) for call in calls]
            called.update(call["id"] for call in sent["tool_calls"])
        elif role == "tool" and message.get("tool_call_id") in called:
            sent["tool_call_id"] = message["tool_call_id"]
        elif role == "tool":
            sent["role"] = "user"
        wire.append(sent)
    return wire


def _part_to_wire(part: Any) -> Any:
    """Return a part of a message in the form that OpenAI's API takes, which has another form for images."""
    is_image = isinstance(part, dict) and part.get("type") == "image" and "image" in part
    return {"type": "image_url", "image_url": {"url": part["image"]}} if is_image else part


def calls_from_wire(calls: Any) -> list[TextCall]:
    """Parse the `tool_calls` of an answer. A defect in a call becomes its status, as with calls in sampled text."""
    return [_call_from_wire(call) for call in calls] if isinstance(calls, list) else []


def _call_to_wire(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"] or NAMELESS, "arguments": text},
    }


def _call_from_wire(call: Any) -> TextCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return TextCall(json.dumps(call), status="malformed_structure")
    call_id = call.get("id")
    name, arguments = function.get("name"), function.get("arguments")
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    named = TextCall(raw, name if isinstance(name, str) else None, id=call_id if isinstance(call_id, str) else None)
    try:
        found = strict_loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
    except ValueError:
        return named._replace(status="invalid_json")
    if not isinstance(found, dict):
        return named._replace(status="malformed_structure")
    return named._replace(arguments=found, status="ok" if named.name else "missing_name")


def closed(content: str, stop: tuple[str, ...]) -> str:
    """Return `content` with the stop string that the API cut off, where it can be inferred.

    The engines of mtrl leave stop strings in the text, and environments look for them; APIs remove them. A stop string
    such as `</sql>` is appended if the content has more `<sql>` than `</sql>`.
    """
    for text in stop:
        opening = text.replace("</", "<", 1)
        if text.startswith("</") and content.count(opening) > content.count(text):
            return content + text
    return content
