"""The trajectories of the engine, and the batch of those that decode together, one token at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.sampling import SamplingRows, Uniforms, sample
from mtrl.engines.local.stop_strings import StopStrings, span
from mtrl.types import FinishReason, Generation
from mtrl.utils.expert_ids import ExpertIds


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
    first_experts: ExpertIds | None = None
    """Experts of the tokens that were computed before new weights arrived: those with which the tokens after them were
    sampled. None before new weights, and if no experts are recorded."""

    def __post_init__(self) -> None:
        self.context = self.prompt_ids

    def start_over(self) -> None:
        """Note that no token of this turn is cached any more. The sampled tokens become part of the context."""
        self.context = self.prompt_ids + self.token_ids

    def experts_of(self, cached: ExpertIds | None) -> ExpertIds | None:
        """Return the experts of the tokens of the turn at their first computation; None unless these are all tokens but
        the last, and for a turn without sampled tokens, whose context may not be the one that is cached.

        Args:
            cached: experts of the cached tokens.
        """
        if not self.token_ids:
            return None
        first, computed = self.first_experts, len(self.prompt_ids) + len(self.token_ids) - 1
        if first is not None:
            cached = first if cached is None else np.concatenate([first, cached[len(first) :]])
        return cached if cached is not None and len(cached) == computed else None

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
    experts: ExpertIds | None = None
    """[len(ids), layers, k] experts that computed the tokens of `ids`; None without tokens or if none are recorded."""
    request: SampleRequest | None = None
    released: bool = False

    def common_prefix(self, context: list[int]) -> int:
        """Return the number of cached tokens that `context` starts with; at least one token of `context` is left to
        feed."""
        limit = min(len(self.ids), len(context) - 1)
        if self.ids[:limit] == context[:limit]:
            return limit
        return next(i for i in range(limit) if self.ids[i] != context[i])

    def cut(self, length: int) -> None:
        """Keep the first `length` cached tokens."""
        self.ids = self.ids[:length]
        self.experts = None if self.experts is None else self.experts[:length]

    def add_experts(self, computed: ExpertIds | None) -> None:
        """Add the experts of tokens that were computed after the cached ones."""
        known = [ids for ids in (self.experts, computed) if ids is not None]
        self.experts = np.concatenate(known) if known else None

    def discard_cache(self) -> None:
        """Discard the cached tokens, because their keys and values are of older weights."""
        if self.request is not None:
            if self.request.token_ids:
                self.request.first_experts = self.request.experts_of(self.experts)
            self.request.start_over()
        self.ids, self.experts = [], None

    def finish(self, reason: FinishReason) -> None:
        """Deliver the sampled turn to the caller that waits for it."""
        request, self.request = self.request, None
        if request and not request.future.done():
            experts = request.experts_of(self.experts)
            generation = Generation(
                request.token_ids, request.logprobs, reason, request.spans, request.cached_tokens, experts
            )
            request.future.set_result(generation)


class DecodeBatch:
    """Row i is `sessions[i]` in slot i (or, before its first token, in the slots being prefilled).

    The state of the rows is in arrays, which are built again whenever the rows change.
    """

    def __init__(
        self, sessions: list[EngineSession], stops: StopStrings, device: torch.device, max_context_length: int
    ):
        params = [s.request.sampling for s in sessions]
        self.sessions, self.stops, self.device = sessions, stops, device
        self.ended: dict[int, FinishReason] = {}
        """Finish reason of each turn that ended, by row."""
        lengths = [len(s.ids) for s in sessions]
        self.lengths = torch.tensor(lengths, device=device)
        """Number of tokens in the cache, per row [n]."""
        self.ones = torch.ones_like(self.lengths)
        self.width = max(lengths) + 1
        """Number of tokens that the longest row holds after the next one is fed."""
        self.last = torch.tensor(
            [s.request.token_ids[-1] if s.request.token_ids else 0 for s in sessions], device=device
        )
        totals = np.array([len(s.request.prompt_ids) + len(s.request.token_ids) for s in sessions])
        sampled = np.array([len(s.request.token_ids) for s in sessions])
        room = np.array([p.max_generate_length for p in params]) - sampled
        self._room = np.minimum(room, max_context_length - totals)
        self._rows = SamplingRows.of(params, device)
        self._uniforms = Uniforms(np.array([p.seed for p in params], dtype=np.uint64), totals, device)
        self._stop_ids = _padded([p.stop_token_ids for p in params])
        self._stop_texts = {i: p.stop for i, p in enumerate(params) if p.stop}
        self._ids: list[np.ndarray] = []
        self._logprobs: list[Tensor] = []
        self._experts: list[Tensor] = []

    def take(self, logits: Tensor, experts: Tensor | None = None) -> None:
        """Sample one token per row from logits [n, V], and record the turns that end with it in `ended`. The ids are
        the only numbers for which the device is waited for; log-probs stay there until `flush`.

        Args:
            experts: [n, 1, layers, k] ids of the experts that computed the token before it, if they are recorded.
        """
        if experts is not None:
            self._experts.append(experts)
        self.last, logprobs = sample(logits, self._rows, self._uniforms.next())
        ids = self.last.cpu().numpy()
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self._room -= 1
        stopped = (ids[:, None] == self._stop_ids).any(-1)
        for row in np.flatnonzero(stopped | (self._room <= 0)):
            self.ended[int(row)] = FinishReason.STOP if stopped[row] else FinishReason.LENGTH
        for row, texts in self._stop_texts.items():
            if self._completes_stop(row, texts):
                self.ended[row] = FinishReason.STOP

    def advance(self) -> None:
        """Count the tokens that were just fed: the length of every row grows by one."""
        self.lengths += 1
        self.width += 1

    def flush(self, version: int) -> None:
        """Append the sampled tokens to their requests, as tokens of policy `version`."""
        if not self._ids:
            return
        ids, logprobs = np.stack(self._ids, 1).tolist(), torch.stack(self._logprobs, 1).tolist()
        experts = torch.cat(self._experts, 1).cpu().numpy() if self._experts else [None] * len(ids)
        self._ids, self._logprobs, self._experts = [], [], []
        for session, row_ids, row_logprobs, row_experts in zip(self.sessions, ids, logprobs, experts, strict=True):
            request = session.request
            if request is None:
                continue  # released while it decoded
            request.token_ids += row_ids
            request.logprobs += row_logprobs
            request.add_span(version, len(row_ids))
            session.ids = request.prompt_ids + request.token_ids[:-1]
            session.add_experts(row_experts)

    def _completes_stop(self, row: int, texts: tuple[str, ...]) -> bool:
        """Whether the newest tokens of a row complete one of the stop strings."""
        request = self.sessions[row].request
        if request is None or not self.stops.may_complete(int(self._ids[-1][row]), texts):
            return False
        length = span(texts)
        tail = [*request.token_ids[-length:], *(int(ids[row]) for ids in self._ids[-length:])][-length:]
        return self.stops.complete(tail, texts)


def _padded(lists: list[tuple[int, ...]]) -> np.ndarray:
    out = np.full((len(lists), max(1, *map(len, lists)) if lists else 1), -1)
    for row, values in zip(out, lists, strict=True):
        row[: len(values)] = values
    return out
