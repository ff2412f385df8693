"""OpenAI's chat completions: `POST /v1/chat/completions`.

Fields that are not supported and would change the answer are refused; harmless fields are accepted and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mtrl.gateway import fields
from mtrl.gateway.dialects.openai import DONE, Head, shared_fields, token_logprobs, usage
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest
from mtrl.types import Message

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.gateway.session import Session

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Chat:
    """A request for chat completions; see `Dialect`."""

    end = DONE

    def __init__(self, body: Any, model: str, session: Session):
        self.request = read_chat(body)
        self._codec = session.codec if self.request.logprobs else None
        self._head = Head(self.request.model or model, f"chatcmpl-{uuid4().hex}")

    def body(self, calls: Sequence[ModelCall]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": wire_message(call.message),
                "logprobs": self._logprobs(call),
                "finish_reason": call.finish_reason,
            }
            for index, call in enumerate(calls)
        ]
        return {**self._head.fields("chat.completion"), "choices": choices, "usage": usage(calls)}

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.request.n)]

    def events(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(calls):
            message = wire_message(call.message)
            if "reasoning_content" in message:
                yield self._chunk(index, {"reasoning_content": message["reasoning_content"]})
            if message["content"] or self._codec:
                yield self._chunk(index, {"content": message["content"] or ""}, logprobs=self._logprobs(call))
            for number, tool_call in enumerate(message.get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{"index": number, **tool_call}]})
            yield self._chunk(index, {}, finish=call.finish_reason)
        if self.request.include_usage:
            yield {**self._head.fields("chat.completion.chunk"), "choices": [], "usage": usage(calls)}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error.body()

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head.fields("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self.request.include_usage else chunk

    def _logprobs(self, call: ModelCall) -> dict[str, Any] | None:
        return None if self._codec is None else {"content": token_logprobs(call, self._codec), "refusal": None}


def wire_message(message: Message) -> Message:
    """Return an assistant's message in the form that clients take. A malformed call has the text that the model wrote
    as its arguments, so that a program detects the error as it would with any model."""
    calls = [wire_call(call) for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    sent: Message = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning := message.get("reasoning_content"):
        sent["reasoning_content"] = reasoning
    if calls:
        sent["tool_calls"] = calls
    return sent


def wire_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, with the arguments as JSON text."""
    name, arguments = call["function"]["name"], arguments_text(call["function"]["arguments"])
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text; text that the model wrote instead of an object stays as it is."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_chat(body: Any) -> ChatRequest:
    """Check the body of a request.

    Raises:
        RequestError: 400; it names the field at fault.
    """
    body = fields.as_object(body)
    max_completion_tokens = fields.whole(body, "max_completion_tokens")
    shared = shared_fields(body, ("messages", "tools", "tool_choice", "max_completion_tokens"))
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=_tools(body),
        logprobs=fields.flag(body, "logprobs"),
        **{**shared, "max_tokens": max_completion_tokens or shared["max_tokens"]},
    )


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools for the prompt; None if there are none, or none may be called."""
    may_call = may_call_tools(body)
    tools = fields.typed(body, "tools", list, "a list of tools") or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise fields.bad(f"tools[{index}]", "is not a function with a name; the model can call nothing else")
    return fields.plain("tools", tools) if tools and may_call else None


def may_call_tools(body: dict[str, Any]) -> bool:
    """Return whether `tool_choice` lets the model call tools; a choice that forces a call is refused."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        what = f"is {fields.shown(choice)}, but the model alone decides what it calls; use auto or none"
        raise fields.bad("tool_choice", what)
    return choice != "none"


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise fields.bad("messages", "must be a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise fields.bad(where, f"has the role {fields.shown(role)}; it must be one of {', '.join(ROLES)}")
    checked: Message = {"role": ROLES[role], "content": fields.content(f"{where}.content", message.get("content"))}
    if role == "assistant":
        if isinstance(reasoning := message.get("reasoning_content"), str) and reasoning:
            checked["reasoning_content"] = fields.text(reasoning)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise fields.bad(f"{where}.tool_calls", f"is {fields.shown(calls)}; it must be a list of tool calls")
        if calls:
            checked["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(given := message.get(name), str):
            checked[name] = fields.text(given)
    return checked


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise fields.bad(where, "is not a call of a function with a name")
    arguments = fields.arguments(f"{where}.arguments", function.get("arguments"))
    return fields.call(function["name"], call.get("id"), arguments)
