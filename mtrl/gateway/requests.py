"""Requests of clients, in the form that all dialects are converted to: content is text, arguments of tool calls are
objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mtrl.types import Message


def unchanged(message: Message) -> Message:
    return message


@dataclass(frozen=True, kw_only=True)
class BaseRequest:
    """Parameters of the answer that all kinds of request share."""

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
    to_client: Callable[[Message], Message] = unchanged
    """Function that returns the message of an answer in the form in which the client will send it back. Dialects that
    cannot express everything that a model samples, such as arguments that are no object, use it."""


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


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(BaseRequest):
    """Request to continue a text or token ids."""

    prompt: str | list[int]
