"""Sampled answers in the format of OpenAI's API."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mtrl.types import Message

if TYPE_CHECKING:
    from mtrl.gateway.calls import Call
    from mtrl.rollout.conversation import Codec


@dataclass(frozen=True)
class Answer:
    """Fields that all chunks of one answer share."""

    model: str
    """Model name from the request: every name refers to the only model of the gateway."""
    kind: str = "chat.completion"
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str | None = None) -> dict[str, Any]:
        return {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model}


def chat_completion(answer: Answer, calls: Sequence[Call], codec: Codec | None) -> dict[str, Any]:
    """Return the body of a `/v1/chat/completions` answer, with log-probs if a codec is given to decode their tokens."""
    choices = [
        {
            "index": index,
            "message": wire_message(call.message),
            "logprobs": chat_logprobs(call, codec) if codec else None,
            "finish_reason": call.finish_reason,
        }
        for index, call in enumerate(calls)
    ]
    return {**answer.head(), "choices": choices, "usage": usage(calls)}


def completion(answer: Answer, calls: Sequence[Call], codec: Codec | None) -> dict[str, Any]:
    """Return the body of a `/v1/completions` answer."""
    choices = [completion_choice(index, call, codec) for index, call in enumerate(calls)]
    return {**answer.head(), "choices": choices, "usage": usage(calls)}


def completion_choice(index: int, call: Call, codec: Codec | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": call.text,
        "logprobs": completion_logprobs(call, codec) if codec else None,
        "finish_reason": call.finish_reason,
    }


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
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": text}}


def usage(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the token counts of a request. The prompt counts once, however many answers there are."""
    prompt = calls[0].prompt_tokens if calls else 0
    sampled = sum(len(call.generation.token_ids) for call in calls)
    cached = min(prompt, max((call.generation.cached_tokens for call in calls), default=0))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(call: Call, codec: Codec) -> dict[str, Any]:
    tokens = [
        {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
        for text, logprob in _tokens(call, codec)
    ]
    return {"content": tokens, "refusal": None}


def completion_logprobs(call: Call, codec: Codec) -> dict[str, Any]:
    named = _tokens(call, codec)
    offsets, offset = [], 0
    for text, _ in named:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [text for text, _ in named],
        "token_logprobs": [logprob for _, logprob in named],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _tokens(call: Call, codec: Codec) -> list[tuple[str, float]]:
    """Return the sampled tokens without the one that ended the turn, each with its log-prob."""
    ids = codec.without_stop(call.generation.token_ids)
    return [(codec.tokenizer.decode([i]), p) for i, p in zip(ids, call.generation.logprobs, strict=False)]


def _bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token; None for a part of a character, which has no text of its own."""
    return None if "�" in text else list(text.encode(errors="replace"))


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mtrl"}
