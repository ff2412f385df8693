"""OpenAI's responses: `POST /v1/responses` and `POST /v1/responses/input_tokens`.

https://platform.openai.com/docs/api-reference/responses describes the API. A conversation is a list of items here
(`response_items.py`), and a request may name an earlier response instead of repeating its items.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mtrl.gateway import fields
from mtrl.gateway.dialects.chat import may_call_tools
from mtrl.gateway.dialects.openai import HARMLESS, OpenAIUsage, token_logprobs
from mtrl.gateway.dialects.response_items import Tools, answer_items, input_messages, with_inputs
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest
from mtrl.types import Message

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.gateway.session import Session

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that requests the log-probs of the answer."""

_READ = (
    "model", "input", "instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "stream",
    "tools", "tool_choice", "include", "text", "reasoning", "stream_options",
)  # fmt: skip
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that would change the answer, and their accepted values besides null, which have no effect."""


class Responses:
    """A request for a response; see `Dialect`."""

    end = b""

    def __init__(self, body: Any, model: str, session: Session):
        body = fields.as_object(body)
        self._conversation = read_conversation(body, session.stored_messages)
        self._tools = read_tools(body)
        self.request = read_responses(body, self._conversation, self._tools)
        self._session = session
        self._codec = session.codec if self.request.logprobs else None
        self._id, self._created = f"resp_{uuid4().hex}", int(time.time())
        self._is_stored = body.get("store") is not False
        self._echo = {
            "model": self.request.model or model,
            "instructions": body.get("instructions"),
            "previous_response_id": body.get("previous_response_id"),
            "max_output_tokens": self.request.max_tokens,
            "temperature": self.request.temperature,
            "top_p": self.request.top_p,
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "metadata": body.get("metadata") or {},
            "store": self._is_stored,
        }

    def body(self, calls: Sequence[ModelCall]) -> dict[str, Any]:
        (call,) = calls
        if self._is_stored:
            self._session.stored_messages[self._id] = [*self._conversation, call.message]
        return self._response(calls, self._items(call))

    def opening(self) -> list[dict[str, Any]]:
        started = self._response([], [])
        return [
            {"type": "response.created", "sequence_number": 0, "response": started},
            {"type": "response.in_progress", "sequence_number": 1, "response": started},
        ]

    def events(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        response = self.body(calls)
        events = [event for index, item in enumerate(response["output"]) for event in _item_events(index, item)]
        last = {"type": f"response.{response['status']}", "response": response}
        for number, event in enumerate([*events, last], start=2):
            yield {**event, "sequence_number": number}

    def error(self, error: RequestError) -> dict[str, Any]:
        failed = {"code": error.code or "server_error", "message": error.message}
        response = {**self._response([], []), "status": "failed", "error": failed}
        return {"type": "response.failed", "sequence_number": 2, "response": response}

    def _items(self, call: ModelCall) -> list[dict[str, Any]]:
        logprobs = [] if self._codec is None else token_logprobs(call, self._codec)
        return answer_items(call.message, self._tools, logprobs)

    def _response(self, calls: Sequence[ModelCall], output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response: in progress if there is no call yet."""
        is_cut = any(call.finish_reason == "length" for call in calls)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_cut else "completed" if calls else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            **self._echo,
            "output": output,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": _usage(calls) if calls else None,
        }


def _usage(calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the token counts. Tokens of reasoning are not counted apart from the answer's."""
    counts = OpenAIUsage.of(calls)
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.sampled,
    }


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one item of an answer."""
    place = {"output_index": index, "item_id": item["id"]}
    started = {**item, **({"content": []} if "content" in item else {}), "status": "in_progress"}
    if item["type"] == "function_call":
        started["arguments"] = ""
    elif item["type"] == "custom_tool_call":
        started["input"] = ""
    yield {"type": "response.output_item.added", "output_index": index, "item": started}
    if item["type"] == "function_call":
        kind, whole = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": whole}
        yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": whole}
    elif item["type"] == "custom_tool_call":
        yield {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]}
        yield {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]}
    else:
        yield from _part_events(place, item["content"][0])
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of the only part of a message or of a reasoning item."""
    place = {**place, "content_index": 0}
    kind = f"response.{part['type']}"  # output_text or reasoning_text
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **{name: [] for name in logprobs}}
    yield {"type": "response.content_part.added", **place, "part": empty}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def read_conversation(body: dict[str, Any], stored: Mapping[str, list[Message]]) -> list[Message]:
    """Return the conversation of a request without its instructions, which do not carry over to later requests.

    Args:
        stored: the conversation of each earlier response of the trajectory, with its answer, by the id of the response.

    Raises:
        RequestError: 400; it names the field at fault.
    """
    earlier = fields.typed(body, "previous_response_id", str, "the id of a response")
    if earlier is not None and earlier not in stored:
        what = f"is {fields.shown(earlier)}, which is not the id of a stored response of this trajectory"
        raise fields.bad("previous_response_id", what)
    conversation = [*stored.get(earlier or "", ()), *input_messages(body.get("input"))]
    if not conversation:
        raise fields.bad("input", "must be a text or a list of at least one item")
    return conversation


def read_responses(body: dict[str, Any], conversation: list[Message], tools: Tools) -> ChatRequest:
    """Check the other fields of a request.

    Raises:
        RequestError: 400; it names the field at fault.
    """
    fields.refuse(body, _REFUSED)
    format = (fields.typed(body, "text", dict, "an object") or {}).get("format")
    if format not in (None, {"type": "text"}):
        raise fields.bad("text.format", f"is {fields.shown(format)}, which is not supported here; remove it")
    include = fields.typed(body, "include", list, "a list of texts") or []
    given = {*body} - {*_READ, *HARMLESS, *_REFUSED}
    return ChatRequest(
        messages=_with_instructions(body, conversation),
        tools=tools.offered if tools.offered and may_call_tools(body) else None,
        max_tokens=fields.whole(body, "max_output_tokens"),
        temperature=fields.number(body, "temperature", 2.0),
        top_p=fields.number(body, "top_p", 1.0),
        logprobs=LOGPROBS in include,
        stream=fields.flag(body, "stream"),
        model=fields.text(fields.typed(body, "model", str, "a text") or ""),
        unknown=(*sorted(given), *tools.hosted),
        to_client=partial(with_inputs, tools.custom),
    )


def _with_instructions(body: dict[str, Any], conversation: list[Message]) -> list[Message]:
    """Return the messages for the chat template, many of which accept only one system message, at the beginning."""
    instructions = fields.text(fields.typed(body, "instructions", str, "a text") or "")
    leading = next((i for i, message in enumerate(conversation) if message["role"] != "system"), len(conversation))
    system = [text for text in (instructions, *(message["content"] for message in conversation[:leading])) if text]
    first: list[Message] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    messages = [*first, *conversation[leading:]]
    if not messages:
        raise fields.bad("input", "has only system messages without text; add a message of the user")
    return messages


def read_tools(body: dict[str, Any]) -> Tools:
    """Return the tools of a request.

    Raises:
        RequestError: 400; it names the tool at fault.
    """
    tools = Tools()
    for index, tool in enumerate(fields.typed(body, "tools", list, "a list of tools") or []):
        tools.add(f"tools[{index}]", tool)
    return tools
