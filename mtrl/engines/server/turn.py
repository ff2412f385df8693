"""The state of one turn across all the requests that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerError, TurnRequest
from mtrl.types import FinishReason, Generation


@dataclass
class PartialTurn:
    """A turn with the tokens that were sampled so far.

    A server may end a request before its turn has ended (some pauses do). The next request then continues after the
    prompt and the sampled tokens, so that every token keeps the log-prob and the version that it was sampled with.
    With stop strings, the turn starts again instead: a server searches only its own tokens for stop strings, and
    would miss one that spans two requests.
    """

    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Maximum number of tokens of the whole turn."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int = 0

    def request(self, request_id: str, cache_salt: str | None, adapter: str | None) -> TurnRequest:
        """Return the request for the tokens that are missing."""
        context, left = [*self.prompt, *self.token_ids], self.max_tokens - len(self.token_ids)
        return TurnRequest(request_id, context, self.sampling, left, cache_salt, adapter)

    def can_continue(self, interrupted: Generation) -> bool:
        """Whether the turn can continue after the tokens of an interrupted answer."""
        return bool(interrupted.token_ids) and not self.sampling.stop

    def add(self, answer: Generation) -> Generation | None:
        """Add an answer to `request`; return the whole turn if it has ended, else None."""
        if not self.token_ids:
            self.cached_tokens = min(max(0, answer.cached_tokens), len(self.prompt))
        if answer.finish == FinishReason.ABORT and not self.can_continue(answer):
            return None
        self.token_ids += answer.token_ids
        self.logprobs += answer.logprobs
        for version, count in answer.version_spans:
            self._add_span(version, count)
        # SGLang reports the limit, or an abort, where the last token is a stop token as well.
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return self._whole(FinishReason.STOP)
        if answer.finish != FinishReason.ABORT:
            return self._whole(answer.finish)
        return self._whole(FinishReason.LENGTH) if len(self.token_ids) >= self.max_tokens else None

    def _add_span(self, version: int, count: int) -> None:
        if self.version_spans and self.version_spans[-1][0] == version:
            count += self.version_spans.pop()[1]
        if count:
            self.version_spans.append((version, count))

    def _whole(self, finish: FinishReason) -> Generation:
        return Generation(self.token_ids, self.logprobs, finish, self.version_spans, self.cached_tokens)


def check_answer(answer: Generation, request: TurnRequest, vocabulary: int) -> None:
    """Check that an answer is a valid answer to the request.

    Raises:
        ServerError: the answer is invalid.
    """
    tokens, spans = len(answer.token_ids), sum(count for _, count in answer.version_spans)
    if tokens > request.max_tokens:
        problem = f"{tokens} tokens where at most {request.max_tokens} were requested"
    elif not answer.token_ids and answer.finish != FinishReason.ABORT:
        problem = "no token"
    elif any(count < 0 for _, count in answer.version_spans):
        problem = "versions with a negative number of tokens"
    elif wrong := [token for token in answer.token_ids if type(token) is not int or not 0 <= token < vocabulary]:
        problem = f"the token id {wrong[0]!r:.40}, and the model's largest id is {vocabulary - 1}"
    elif not tokens == len(answer.logprobs) == spans:
        problem = f"{tokens} tokens with {len(answer.logprobs)} log-probs and versions of {spans}"
    elif not all(math.isfinite(logprob) for logprob in answer.logprobs):
        problem = "log-probs that are not finite"
    else:
        return
    raise ServerError(f"the server answered {problem}")
