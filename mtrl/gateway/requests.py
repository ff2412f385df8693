"""Requests of clients: the bodies of `/v1/chat/completions` and `/v1/completions`, checked once, here.

Messages are converted to the form that the rest of mtrl uses: content is text, arguments of tool calls are objects.
Fields that are not supported and would change the answer are refused; harmless fields are accepted and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mtrl.gateway.exchange import RequestError
from mtrl.types import Message
from mtrl.utils.strict_json import check_depth, strict_loads

MAX_ANSWERS = 128
MAX_STOP_STRINGS = 16
"""Maximum number of stop strings of a request. OpenAI takes 4, servers of open models take more."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = ("model", "n", "max_tokens", "stop", "temperature", "top_p", "logprobs", "stream", "stream_options")
_HARMLESS = (
    "user", "metadata", "seed", "parallel_tool_calls", "store", "service_tier", "safety_identifier", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "verbosity",
)  # fmt: skip
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields that would change the answer, and their accepted values besides null, which have no effect."""


@dataclass(frozen=True, kw_only=True)
class BaseRequest:
    """Parameters of the answer that both kinds of request share."""

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    model: str = ""
    unknown: tuple[str, ...] = ()
    """Names of the fields that the gateway does not know."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(BaseRequest):
    """Request to continue a conversation."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def characters(self) -> int:
        """Lower bound of the number of characters that the model has to read."""
        texts = (value for message in self.messages for value in message.values() if isinstance(value, str))
        calls = (message["tool_calls"] for message in self.messages if "tool_calls" in message)
        parts = [*calls, *([self.tools] if self.tools else [])]
        return sum(map(len, texts)) + sum(len(json.dumps(part, ensure_ascii=False)) for part in parts)

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Check the body of a request.

        Raises:
            RequestError: 400; it names the field at fault.
        """
        body = _object(body)
        max_completion_tokens = _whole(body, "max_completion_tokens")
        shared = _shared_fields(body, ("messages", "tools", "tool_choice", "max_completion_tokens"))
        return cls(
            messages=_messages(body.get("messages")),
            tools=_tools(body),
            logprobs=bool(_typed(body, "logprobs", bool, "true or false")),
            **{**shared, "max_tokens": max_completion_tokens or shared["max_tokens"]},
        )


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(BaseRequest):
    """Request to continue a text or token ids."""

    prompt: str | list[int]

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Check the body of a request. `logprobs` is a number here: 0 requests those of the sampled tokens.

        Raises:
            RequestError: 400; it names the field at fault.
        """
        body = _object(body)
        logprobs = body.get("logprobs")
        if logprobs not in (None, 0):  # False is 0 as well
            raise _bad(
                "logprobs", f"is {_shown(logprobs)}; alternatives to the sampled tokens are not stored, so use 0"
            )
        wants_logprobs = logprobs is not None and logprobs is not False
        return cls(prompt=_prompt(body.get("prompt")), logprobs=wants_logprobs, **_shared_fields(body, ("prompt",)))


def _shared_fields(body: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `BaseRequest` except `logprobs`, which the two kinds of request write differently."""
    for name, allowed in _REFUSED.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            raise _bad(name, f"is {_shown(value)}, which is not supported here; remove it")
    options = _typed(body, "stream_options", dict, "an object") or {}
    return {
        "n": _whole(body, "n", MAX_ANSWERS) or 1,
        "max_tokens": _whole(body, "max_tokens"),
        "stop": _stop(body.get("stop")),
        "temperature": _number(body, "temperature", 2.0),
        "top_p": _number(body, "top_p", 1.0),
        "stream": bool(_typed(body, "stream", bool, "true or false")),
        "include_usage": options.get("include_usage") is True,
        "model": _text(_typed(body, "model", str, "a text") or ""),
        "unknown": tuple(sorted(set(body) - {*_READ, *_HARMLESS, *_REFUSED, *own})),
    }


def _bad(param: str, what: str) -> RequestError:
    return RequestError(400, f"{param} {what}", param=param)


def _shown(value: Any) -> str:
    """Return the beginning of the `repr` of a value that a client sent."""
    try:
        return f"{value!r:.50}"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep"


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object; send one with a model and messages or a prompt")
    return dict(body)


def _text(value: str) -> str:
    """Replace lone surrogates by question marks: neither a file nor a tokenizer accepts them."""
    return value if value.isascii() else value.encode(errors="replace").decode()


def _typed(body: dict[str, Any], name: str, kind: type, form: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise _bad(name, f"is {_shown(value)}; it must be {form}")
    return value


def _whole(body: dict[str, Any], name: str, maximum: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (maximum is not None and value > maximum):
        upto = "" if maximum is None else f" and at most {maximum}"
        raise _bad(name, f"is {_shown(value)}; it must be a whole number of at least 1{upto}")
    return value


def _number(body: dict[str, Any], name: str, maximum: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= maximum:
        raise _bad(name, f"is {_shown(value)}; it must be a number from 0 to {maximum:g}")
    return float(value)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _bad("stop", f"is {_shown(value)}; it must be a text or a list of texts, none of them empty")
    if len(texts) > MAX_STOP_STRINGS:
        raise _bad("stop", f"has {len(texts)} texts; at most {MAX_STOP_STRINGS} are accepted")
    return tuple(dict.fromkeys(_text(text) for text in texts))


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return _text(value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return list(value)
    raise _bad("prompt", f"is {_shown(value)}; it must be one text or one list of token ids, and not empty")


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools for the prompt; None if there are none, or none may be called."""
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _bad("tool_choice", f"is {_shown(choice)}, but the model alone decides what it calls; use auto or none")
    tools = _typed(body, "tools", list, "a list of tools") or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise _bad(f"tools[{index}]", "is not a function with a name; the model can call nothing else")
    return _plain("tools", tools) if tools and choice != "none" else None


def _plain(param: str, value: Any) -> Any:
    """Return a copy in plain JSON, with lone surrogates replaced, that can be written to any file."""
    try:
        check_depth(value)
        return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise _bad(param, f"is not plain JSON ({error})") from None


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _bad("messages", "must be a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(where: str, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise _bad(where, f"has the role {_shown(role)}; it must be one of {', '.join(_ROLES)}")
    checked: Message = {"role": _ROLES[role], "content": _content(f"{where}.content", message.get("content"))}
    if role == "assistant":
        if isinstance(reasoning := message.get("reasoning_content"), str) and reasoning:
            checked["reasoning_content"] = _text(reasoning)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise _bad(f"{where}.tool_calls", f"is {_shown(calls)}; it must be a list of tool calls")
        if calls:
            checked["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if isinstance(given := message.get(name), str):
            checked[name] = _text(given)
    return checked


def _content(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return _text(content or "")
    if not isinstance(content, list):
        raise _bad(where, f"is {_shown(content)}; it must be a text or a list of parts")
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("thinking", "redacted_thinking", "reasoning"):  # parts of earlier answers that some clients send back
        return ""
    text = part.get("refusal" if kind == "refusal" else "text") if kind in ("text", "input_text", "refusal") else part
    if not isinstance(text, str):
        raise _bad(where, f"is a part of the type {_shown(kind)}; the model reads only text")
    return _text(text)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad(where, "is not a call of a function with a name")
    call_id, arguments = call.get("id"), function.get("arguments")
    return {
        "type": "function",
        "id": _text(call_id) if isinstance(call_id, str) else "",
        "function": {"name": _text(function["name"]), "arguments": _arguments(f"{where}.arguments", arguments)},
    }


def _arguments(where: str, arguments: Any) -> Any:
    """Return the arguments as an object. Text that holds no object stays text, because a model may have sampled it."""
    if isinstance(arguments, str):
        try:
            found = _plain(where, strict_loads(arguments or "{}"))
        except (ValueError, RequestError):
            return _text(arguments)
        return found if isinstance(found, dict) else _text(arguments)
    if arguments is None or isinstance(arguments, dict):
        return _plain(where, arguments or {})
    raise _bad(where, f"is {_shown(arguments)}; it must be an object as JSON text")
