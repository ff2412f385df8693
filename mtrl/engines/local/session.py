"""The engine's state of one trajectory: its cached tokens, and the turn that it has requested."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mtrl.engines.base import Generation, SamplingParams
from mtrl.types import FinishReason


@dataclass
class SampleRequest:
    """One turn to sample."""

    prompt_ids: list[int]
    sampling: SamplingParams
    future: asyncio.Future[Generation]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    """Number of prompt tokens that were cached when the turn began."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    context: list[int] = field(init=False)
    """Token ids that must be in the cache before the next token is sampled: the prompt and, after new weights, the
    tokens that were sampled so far."""

    def __post_init__(self) -> None:
        self.context = self.prompt_ids

    def start_over(self) -> None:
        """Note that no token of this turn is cached any more. The sampled tokens become part of the context."""
        self.context = self.prompt_ids + self.token_ids

    def record_cached(self, tokens: int) -> None:
        if not self.token_ids:
            self.cached_tokens = tokens

    def add_span(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            tokens += self.spans.pop()[1]
        if tokens:
            self.spans.append((version, tokens))


@dataclass(eq=False)
class EngineSession:
    """A trajectory between `open` and `release`."""

    id: str
    order: int
    """Position in the order of `open`: turns are admitted in this order, independent of their arrival."""
    slot: int | None = None
    ids: list[int] = field(default_factory=list)
    """Token ids whose keys and values are in the slot."""
    request: SampleRequest | None = None
    released: bool = False

    def common_prefix(self, context: list[int]) -> int:
        """Return the number of cached tokens that `context` starts with; at least one token of `context` is left to
        feed."""
        limit = min(len(self.ids), len(context) - 1)
        if self.ids[:limit] == context[:limit]:
            return limit
        return next(i for i in range(limit) if self.ids[i] != context[i])

    def discard_cache(self) -> None:
        """Discard the cached tokens, because their keys and values are of older weights."""
        self.ids = []
        if self.request is not None:
            self.request.start_over()

    def finish(self, reason: FinishReason) -> None:
        """Deliver the sampled turn to the caller that waits for it."""
        request, self.request = self.request, None
        if request and not request.future.done():
            generation = Generation(request.token_ids, request.logprobs, reason, request.spans, request.cached_tokens)
            request.future.set_result(generation)
