"""OpenAI's completions of a text or of token ids: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mtrl.gateway import fields
from mtrl.gateway.dialects.openai import DONE, Head, named_tokens, shared_fields, usage
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import CompletionRequest

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.gateway.session import Session


class Completion:
    """A request for completions; see `Dialect`."""

    end = DONE

    def __init__(self, body: Any, model: str, session: Session):
        self.request = read_completion(body)
        self._codec = session.codec if self.request.logprobs else None
        self._head = Head(self.request.model or model, f"cmpl-{uuid4().hex}").fields("text_completion")

    def body(self, calls: Sequence[ModelCall]) -> dict[str, Any]:
        choices = [self._choice(index, call) for index, call in enumerate(calls)]
        return {**self._head, "choices": choices, "usage": usage(calls)}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def events(self, calls: Sequence[ModelCall]) -> Iterator[dict[str, Any]]:
        for index, call in enumerate(calls):
            chunk = {**self._head, "choices": [self._choice(index, call)]}
            yield {**chunk, "usage": None} if self.request.include_usage else chunk
        if self.request.include_usage:
            yield {**self._head, "choices": [], "usage": usage(calls)}

    def error(self, error: RequestError) -> dict[str, Any]:
        return error.body()

    def _choice(self, index: int, call: ModelCall) -> dict[str, Any]:
        logprobs = self._logprobs(call)
        return {"index": index, "text": call.text, "logprobs": logprobs, "finish_reason": call.finish_reason}

    def _logprobs(self, call: ModelCall) -> dict[str, Any] | None:
        if self._codec is None:
            return None
        named = named_tokens(call, self._codec)
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


def read_completion(body: Any) -> CompletionRequest:
    """Check the body of a request. `logprobs` is a number here: 0 requests those of the sampled tokens.

    Raises:
        RequestError: 400; it names the field at fault.
    """
    body = fields.as_object(body)
    logprobs = body.get("logprobs")
    if logprobs not in (None, 0):  # False is 0 as well
        what = f"is {fields.shown(logprobs)}; alternatives to the sampled tokens are not stored, so use 0"
        raise fields.bad("logprobs", what)
    wants_logprobs = logprobs is not None and logprobs is not False
    shared = shared_fields(body, ("prompt",))
    return CompletionRequest(prompt=_prompt(body.get("prompt")), logprobs=wants_logprobs, **shared)


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return fields.text(value)
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return list(value)
    what = f"is {fields.shown(value)}; it must be one text or one list of token ids, and not empty"
    raise fields.bad("prompt", what)
