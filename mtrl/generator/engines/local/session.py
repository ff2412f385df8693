"""One trajectory as the engine sees it: the tokens in its cache and the turn that it waits for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from mtrl.generator.engines.base import Generation, SamplingParams
from mtrl.types import FinishReason


@dataclass
class Request:
    """One turn to sample."""

    prompt_ids: list[int]
    sampling: SamplingParams
    future: asyncio.Future[Generation]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    """Of the prompt, when the turn began."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    context: list[int] = field(init=False)
    """What has to be in the cache before the next token: the prompt and, after new weights, what was sampled so far."""

    def __post_init__(self) -> None:
        self.context = self.prompt_ids

    def start_over(self) -> None:
        """Nothing of this turn is cached any more; what was sampled stays."""
        self.context = self.prompt_ids + self.token_ids

    def note_cached(self, tokens: int) -> None:
        if not self.token_ids:
            self.cached_tokens = tokens

    def add_span(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            tokens += self.spans.pop()[1]
        if tokens:
            self.spans.append((version, tokens))


@dataclass(eq=False)
class Session:
    """A trajectory between `open` and `release`."""

    id: str
    order: int
    """Rank by `open`: turns are admitted in this order, whenever they arrived."""
    slot: int | None = None
    ids: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slot."""
    request: Request | None = None
    released: bool = False

    def common_prefix(self, context: list[int]) -> int:
        """Cached tokens that `context` begins with; at least one token is left to feed."""
        limit = min(len(self.ids), len(context) - 1)
        if self.ids[:limit] == context[:limit]:
            return limit
        return next(i for i in range(limit) if self.ids[i] != context[i])

    def forget(self) -> None:
        """What is cached is not of the weights in use."""
        self.ids = []
        if self.request is not None:
            self.request.start_over()

    def finish(self, reason: FinishReason) -> None:
        """Hand the sampled turn to whoever waits for it."""
        request, self.request = self.request, None
        if request and not request.future.done():
            generation = Generation(request.token_ids, request.logprobs, reason, request.spans, request.cached_tokens)
            request.future.set_result(generation)
