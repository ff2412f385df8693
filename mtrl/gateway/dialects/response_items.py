"""Items of OpenAI's responses: conversion of a request's items to messages, and of an answer to items.

One answer of the model is several items: its reasoning, its text, and each of its calls.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from mtrl.gateway import fields
from mtrl.gateway.dialects.chat import ROLES, arguments_text
from mtrl.types import Message

INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of a custom tool, whose only argument is a text without a schema."""
_ANSWER = ("reasoning_content", "content", "tool_calls")
"""Keys of an answer, in the order of its items."""


@dataclass
class Tools:
    """The tools of a request."""

    offered: list[dict[str, Any]] = field(default_factory=list)
    """Tools in the form that chat templates take."""
    hosted: list[str] = field(default_factory=list)
    """Types of the tools that OpenAI itself executes, which the model is not offered."""
    custom: set[str] = field(default_factory=set)
    """Names of the custom tools, whose calls are items of another type."""
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and own name of each tool in a namespace, by the name that the model is offered."""

    def add(self, where: str, tool: Any, namespace: str = "") -> None:
        """Read a tool, or the tools of a namespace.

        Raises:
            RequestError: 400; the tool has no name or no type.
        """
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise fields.bad(where, "is not a tool with a type")
        if kind not in ("function", "custom", "namespace"):
            self.hosted.append(f"tools.{fields.text(kind)}")
            return
        if not isinstance(name := tool.get("name"), str) or not name:
            raise fields.bad(where, "is not a function with a name; the model can call nothing else")
        if kind == "namespace":
            for index, inner in enumerate(fields.typed(tool, "tools", list, "a list of tools") or []):
                self.add(f"{where}.tools[{index}]", inner, name)
            return
        offered = qualified(namespace, name)
        if namespace:
            self.namespaces[offered] = (namespace, name)
        if kind == "custom":
            self.custom.add(offered)
        parameters = INPUT if kind == "custom" else tool.get("parameters")
        self.offered.append(fields.function(where, offered, tool.get("description"), parameters))


def qualified(namespace: str, name: str) -> str:
    """Return the name that the model is offered for a tool; `namespace` is empty for most."""
    return f"{namespace}.{name}" if namespace else name


def with_inputs(names: Set[str], message: Message) -> Message:
    """Return an answer whose calls of custom tools (`names`) have exactly one argument, the text `input`."""
    calls = message.get("tool_calls")
    if not calls or not any(call["function"]["name"] in names for call in calls):
        return message
    return {**message, "tool_calls": [_with_input(call) if _name(call) in names else call for call in calls]}


def _name(call: dict[str, Any]) -> str:
    return call["function"]["name"]


def _with_input(call: dict[str, Any]) -> dict[str, Any]:
    values = call["function"]["arguments"]
    is_input = isinstance(values, dict) and [*values] == ["input"] and isinstance(values["input"], str)
    text = values["input"] if is_input else arguments_text(values)
    return {**call, "function": {**call["function"], "arguments": {"input": text}}}


def answer_items(message: Message, tools: Tools, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an answer.

    Args:
        tools: the tools of the request.
        logprobs: log-probs of the sampled tokens, for the item with the text.
    """
    items: list[dict[str, Any]] = []
    calls = message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{uuid4().hex}", "summary": [], "content": content})
    if message.get("content") or not calls:
        text = message.get("content") or ""
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "id": f"msg_{uuid4().hex}", "role": "assistant", "content": [part]})
    for call in calls:
        function, named = call["function"], {"call_id": call["id"], "name": _name(call)}
        if _name(call) in tools.namespaces:
            named["namespace"], named["name"] = tools.namespaces[_name(call)]
        if _name(call) in tools.custom:
            item = {"type": "custom_tool_call", "id": f"ctc_{uuid4().hex}", **named}
            items.append({**item, "input": function["arguments"]["input"]})
        else:
            item = {"type": "function_call", "id": f"fc_{uuid4().hex}", **named}
            items.append({**item, "arguments": arguments_text(function["arguments"])})
    return [{**item, "status": "completed"} for item in items]


def input_messages(value: Any) -> list[Message]:
    """Return the messages of a request's `input`. Consecutive items of one answer become one message.

    Raises:
        RequestError: 400; it names the item at fault.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": fields.text(value)}]
    if not isinstance(value, list):
        raise fields.bad("input", f"is {fields.shown(value)}; it must be a text or a list of items")
    messages: list[Message] = []
    for index, item in enumerate(value):
        part = _message(f"input[{index}]", item)
        if messages and _continues(messages[-1], part):
            _join(messages[-1], part)
        else:
            messages.append(part)
    return [{**message, "content": message.get("content", "")} for message in messages if len(message) > 1]


def _continues(message: Message, part: Message) -> bool:
    """Return whether a part of an answer belongs to the message before it: the reasoning of an answer comes before its
    text, and the text before its calls."""
    if message["role"] != "assistant" or part["role"] != "assistant":
        return False
    last, next = _position(message), _position(part)
    return next > last or next == len(_ANSWER) - 1


def _position(message: Message) -> int:
    """Return the position of the last key of an answer that the message has; -1 if it has none."""
    return max((i for i, name in enumerate(_ANSWER) if name in message), default=-1)


def _join(message: Message, part: Message) -> None:
    """Add a part of an answer to the message, in place, since copies would take quadratic time for many calls."""
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    calls += part.get("tool_calls", ())
    message.update(part)
    if calls:
        message["tool_calls"] = calls


def _message(where: str, item: Any) -> Message:
    """Return the message of an item. A part of an answer has only the keys that the item fills."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise fields.bad(where, f"has the role {fields.shown(role)}; it must be one of {', '.join(ROLES)}")
        joint = "" if role == "assistant" else "\n\n"
        return {"role": ROLES[role], "content": fields.content(f"{where}.content", item.get("content"), joint)}
    if kind == "reasoning":
        return _reasoning(item)
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "tool_calls": [_call(where, item)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = fields.content(f"{where}.output", item.get("output"), "\n\n")
        return {"role": "tool", "content": output, **_call_id(item)}
    raise fields.bad(where, f"is an item of the type {fields.shown(kind)}, which the model cannot read; leave it out")


def _reasoning(item: dict[str, Any]) -> Message:
    """Return the reasoning of an earlier answer; clients may send it back without its text."""
    parts = item.get("content") or []
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else []
    text = "".join(text for text in texts if isinstance(text, str))
    return {"role": "assistant", **({"reasoning_content": fields.text(text)} if text else {})}


def _call(where: str, item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("name"), str):
        raise fields.bad(where, "is not a call of a function with a name")
    if item["type"] == "custom_tool_call":
        if not isinstance(item.get("input"), str):
            raise fields.bad(f"{where}.input", f"is {fields.shown(item.get('input'))}; it must be a text")
        values: Any = {"input": fields.text(item["input"])}
    else:
        values = fields.arguments(f"{where}.arguments", item.get("arguments"))
    namespace = item.get("namespace")
    name = qualified(namespace, item["name"]) if isinstance(namespace, str) else item["name"]
    return fields.call(name, item.get("call_id"), values)


def _call_id(item: dict[str, Any]) -> dict[str, str]:
    call_id = item.get("call_id")
    return {"tool_call_id": fields.text(call_id)} if isinstance(call_id, str) else {}
