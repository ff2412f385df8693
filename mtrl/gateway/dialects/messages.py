"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

https://docs.anthropic.com/en/api/messages describes the API. Unlike in OpenAI's, the system prompt is a field, results
of tools are blocks of a user's message, arguments of calls are objects, and errors have another form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mtrl.gateway import fields
from mtrl.gateway.calls import first_stop_string
from mtrl.gateway.dialects.chat import arguments_text
from mtrl.gateway.dialects.openai import OpenAIUsage
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import ChatRequest
from mtrl.types import Message

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.gateway.session import Session

JOINT = "\n\n"
"""Text between two blocks of text of one message, which are parts of their own in Anthropic's models."""
UNPARSED = "unparsed_arguments"
"""Name of the only argument of a call whose arguments the model did not write as a JSON object: the API requires an
object, and the program's check of the arguments then tells the model its error."""
SIGNATURE = "mtrl"
"""Signature of thinking blocks; clients must send one back, and the gateway reads none."""

_READ = (
    "model", "messages", "system", "max_tokens", "stop_sequences", "temperature", "top_p", "stream", "tools",
    "tool_choice",
)  # fmt: skip
_HARMLESS = ("metadata", "service_tier", "thinking", "context_management", "cache_control", "betas", "inference_geo")
_REFUSED: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": (), "output_format": ()}
"""Fields that would change the answer, and their accepted values besides null, which have no effect."""
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status."""
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class Messages:
    """A request for a message; see `Dialect`."""

    end = b""

    def __init__(self, body: Any, model: str, session: Session):
        self.request = read_messages(body)
        self._model = self.request.model or model
        self._id = f"msg_{uuid4().hex}"

    def body(self, calls: Sequence[ModelCall]) -> dict[str, Any]:
        (call,) = calls
        return {**self._head(), "content": _blocks(call), **self._stop(call), "usage": _usage(calls)}

    def opening(self) -> list[dict[str, Any]]:
        stop = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**self._head(), "content": [], **stop, "usage": _usage([])}}]

    def events(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        (call,) = calls
        for index, block in enumerate(_blocks(call)):
            empty, deltas = _pieces(block)
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": self._stop(call), "usage": _usage(calls)}
        yield {"type": "message_stop"}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error_body(error)

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self, call: ModelCall) -> dict[str, Any]:
        found = first_stop_string(call.decoded, self.request.stop)
        reason = "stop_sequence" if found else _STOP_REASONS[call.finish_reason]
        return {"stop_reason": reason, "stop_sequence": found}


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of a refused request. Programs recognise a full context by the first words of its message."""
    kind = "api_error" if error.status == 500 else _ERROR_TYPES.get(error.status, "invalid_request_error")
    is_full = error.code == "context_length_exceeded"
    message = f"prompt is too long: {error.message}" if is_full else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def models(name: str) -> dict[str, Any]:
    return {"data": [model(name)], "has_more": False, "first_id": name, "last_id": name}


def model(name: str) -> dict[str, Any]:
    created = "1970-01-01T00:00:00Z"
    return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}


def _usage(calls: Sequence[ModelCall]) -> dict[str, Any]:
    counts = OpenAIUsage.of(calls)
    return {
        "input_tokens": counts.prompt - counts.cached,
        "output_tokens": counts.sampled,
        "cache_read_input_tokens": counts.cached,
        "cache_creation_input_tokens": 0,
    }


def _blocks(call: ModelCall) -> list[dict[str, Any]]:
    """Return the content of an answer."""
    message, blocks = call.message, []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": SIGNATURE})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for tool in message.get("tool_calls") or ():
        function = tool["function"]
        blocks.append({"type": "tool_use", "id": tool["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _pieces(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block without its content, with which its stream begins, and the deltas that hold the content."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [
            thinking,
            {"type": "signature_delta", "signature": SIGNATURE},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments_text(block["input"])}]


def with_objects(message: Message) -> Message:
    """Return an answer whose calls all have objects as arguments."""
    calls = message.get("tool_calls")
    if not calls or all(isinstance(call["function"]["arguments"], dict) for call in calls):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    values = call["function"]["arguments"]
    if isinstance(values, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {UNPARSED: values}}}


def read_messages(body: Any) -> ChatRequest:
    """Check the body of a request.

    Raises:
        RequestError: 400; it names the field at fault.
    """
    body = fields.as_object(body)
    fields.refuse(body, _REFUSED)
    format = (fields.typed(body, "output_config", dict, "an object") or {}).get("format")
    if format is not None:
        raise fields.bad("output_config.format", f"is {fields.shown(format)}, which is not supported here; remove it")
    tools, hosted = _tools(body)
    return ChatRequest(
        messages=[*_system(body.get("system")), *_messages(body.get("messages"))],
        tools=tools,
        max_tokens=fields.whole(body, "max_tokens"),
        stop=fields.stop_strings(body, "stop_sequences"),
        temperature=fields.number(body, "temperature", 1.0),
        top_p=fields.number(body, "top_p", 1.0),
        stream=fields.flag(body, "stream"),
        model=fields.text(fields.typed(body, "model", str, "a text") or ""),
        unknown=tuple(sorted({*body} - {*_READ, *_HARMLESS, *_REFUSED, "output_config"})) + hosted,
        to_client=with_objects,
    )


def _system(value: Any) -> list[Message]:
    prompt = fields.content("system", value, JOINT)
    return [{"role": "system", "content": prompt}] if prompt else []


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise fields.bad("messages", "must be a list of at least one message")
    return [found for index, message in enumerate(value) for found in _message(f"messages[{index}]", message)]


def _message(where: str, message: Any) -> list[Message]:
    """Convert one message of this API: each result of a tool becomes a message of its own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise fields.bad(where, f"has the role {fields.shown(role)}; it must be user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise fields.bad(f"{where}.content", f"is {fields.shown(content)}; it must be a text or a list of blocks")
    named = [(f"{where}.content[{index}]", block) for index, block in enumerate(blocks)]
    return [_answer(named)] if role == "assistant" else list(_observations(role, named))


def _answer(blocks: list[tuple[str, Any]]) -> Message:
    texts = [fields.part_text(where, block) for where, block in blocks if _kind(block) != "tool_use"]
    message: Message = {"role": "assistant", "content": "".join(text for text in texts if text is not None)}
    thinking = [block["thinking"] for _, block in blocks if _kind(block) == "thinking" and block.get("thinking")]
    if thinking and all(isinstance(text, str) for text in thinking):
        message["reasoning_content"] = fields.text("".join(thinking))
    calls = [_call(where, block) for where, block in blocks if _kind(block) == "tool_use"]
    return {**message, "tool_calls": calls} if calls else message


def _call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    name, values = block.get("name"), block.get("input")
    if not isinstance(name, str):
        raise fields.bad(where, "is not a call of a tool with a name")
    if values is not None and not isinstance(values, dict):
        raise fields.bad(f"{where}.input", f"is {fields.shown(values)}; it must be an object")
    return fields.call(name, block.get("id"), fields.arguments(f"{where}.input", values))


def _observations(role: str, blocks: list[tuple[str, Any]]) -> Iterator[Message]:
    """Yield the results of tools and the texts between them, in their order."""
    texts: list[str] = []
    for where, block in blocks:
        if _kind(block) != "tool_result":
            text = fields.part_text(where, block)
            texts += [] if text is None else [text]
            continue
        if texts:
            yield {"role": role, "content": JOINT.join(texts)}
            texts = []
        result: Message = {"role": "tool", "content": fields.content(f"{where}.content", block.get("content"), JOINT)}
        if isinstance(call_id := block.get("tool_use_id"), str):
            result["tool_call_id"] = fields.text(call_id)
        yield result
    if texts or not blocks:
        yield {"role": role, "content": JOINT.join(texts)}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, tuple[str, ...]]:
    """Return the tools for the prompt, None if there are none, or none may be called; and the names of the tools that
    Anthropic itself describes or executes, which the model is not offered."""
    choice = (fields.typed(body, "tool_choice", dict, "an object") or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        what = f"is {fields.shown(choice)}, but the model alone decides what it calls; use auto or none"
        raise fields.bad("tool_choice.type", what)
    tools, hosted = [], []
    for index, tool in enumerate(fields.typed(body, "tools", list, "a list of tools") or []):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
            raise fields.bad(where, "is not a tool with a name")
        if tool.get("type") not in (None, "custom"):
            hosted.append(f"tools.{fields.text(tool['name'])}")
            continue
        tools.append(_tool(where, tool))
    return (tools if tools and choice != "none" else None), tuple(hosted)


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form that chat templates take."""
    parameters = tool.get("input_schema")
    return fields.function(where, tool["name"], tool.get("description"), parameters)
