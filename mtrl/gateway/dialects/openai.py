"""What OpenAI's chat completions and completions have in common: parameters, token counts and log-probs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mtrl.gateway import fields

if TYPE_CHECKING:
    from mtrl.gateway.calls import ModelCall
    from mtrl.rollout.conversation import Codec

MAX_ANSWERS = 128
DONE = b"data: [DONE]\n\n"
"""End of a stream."""

_READ = ("model", "n", "max_tokens", "stop", "temperature", "top_p", "logprobs", "stream", "stream_options")
HARMLESS = (
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


def shared_fields(body: dict[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `BaseRequest` except `logprobs`, which the two APIs write differently.

    Args:
        own: further fields that the API of this request has.
    """
    fields.refuse(body, _REFUSED)
    options = fields.typed(body, "stream_options", dict, "an object") or {}
    return {
        "n": fields.whole(body, "n", MAX_ANSWERS) or 1,
        "max_tokens": fields.whole(body, "max_tokens"),
        "stop": fields.stop_strings(body, "stop"),
        "temperature": fields.number(body, "temperature", 2.0),
        "top_p": fields.number(body, "top_p", 1.0),
        "stream": fields.flag(body, "stream"),
        "include_usage": options.get("include_usage") is True,
        "model": fields.text(fields.typed(body, "model", str, "a text") or ""),
        "unknown": tuple(sorted(set(body) - {*_READ, *HARMLESS, *_REFUSED, *own})),
    }


@dataclass(frozen=True)
class Head:
    """Fields that all chunks of one answer share."""

    model: str
    """Model name from the request: every name refers to the only model of the gateway."""
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True)
class OpenAIUsage:
    """Token counts of a request. The prompt counts once, however many answers there are."""

    prompt: int
    sampled: int
    cached: int
    """Tokens of the prompt that the engine had in its cache."""

    @classmethod
    def of(cls, calls: Sequence[ModelCall]) -> OpenAIUsage:
        prompt = calls[0].prompt_tokens if calls else 0
        cached = min(prompt, max((call.generation.cached_tokens for call in calls), default=0))
        return cls(prompt, sum(len(call.generation.token_ids) for call in calls), cached)


def usage(calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the token counts of a request in the form of these two APIs."""
    counts = OpenAIUsage.of(calls)
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.sampled,
        "total_tokens": counts.prompt + counts.sampled,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }


def named_tokens(call: ModelCall, codec: Codec) -> list[tuple[str, float]]:
    """Return the sampled tokens without the one that ended the turn, each with its log-prob."""
    ids = codec.without_stop(call.generation.token_ids)
    return [(codec.tokenizer.decode([i]), p) for i, p in zip(ids, call.generation.logprobs, strict=False)]


def token_logprobs(call: ModelCall, codec: Codec) -> list[dict[str, Any]]:
    """Return the log-prob of each sampled token, in the form of chat completions and responses."""
    return [
        {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
        for text, logprob in named_tokens(call, codec)
    ]


def _bytes(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token; None for a part of a character, which has no text of its own."""
    return None if "�" in text else list(text.encode(errors="replace"))


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "mtrl"}
