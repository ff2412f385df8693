"""Log-probs of given tokens from an OpenAI-compatible completions server (`/v1/completions`).

A request has token ids as its prompt, `echo=true` and `logprobs=1`, which vLLM and SGLang answer with the log-prob of
each token of the prompt at temperature 1. For the most probable tokens of each position it has `prompt_logprobs=k`
instead, an extension of vLLM, since `logprobs=k` gives texts, and different ids can have the same text. One token is
sampled in addition, since not every server takes `max_tokens=0`, and ignored.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import (
    LARGEST,
    Address,
    ChatClient,
    GarbledAnswerError,
    NoAnswerError,
    StatusError,
)
from mtrl.errors import RunEndedError, UserError
from mtrl.models.tokenizer_difference import SAMPLE
from mtrl.types import TopTokens

COMPARED = 128
"""Number of tokens, spread over the vocabulary, whose texts are compared with the server's."""
ROUNDING = 0.01
"""Largest log-prob above 0, in nats, that counts as the rounding of one."""


@dataclass(frozen=True)
class TextAddress(Address):
    """A model and the URL of its server, whose completions are those of texts and not of chats."""

    @property
    def completions(self) -> str:
        return f"{self.url.rstrip('/')}/completions"


@dataclass(frozen=True)
class Scored:
    """The L tokens of a prompt, as a server read them."""

    texts: list[str | None]
    """Text of each token; None where the server gives none."""
    logprobs: list[float]
    """Log-prob of each token given those before it; 0 for the first, which has none."""
    top: TopTokens
    """The k most probable tokens at each of the L positions; zeros for the first, which has none."""


@dataclass
class PromptScorer:
    """Asks a server for the log-probs of prompts, and for the most probable tokens at their positions."""

    client: ChatClient
    top_k: int = 0
    """Number of most probable tokens."""

    @classmethod
    def at(cls, url: str, model: str, config: EndpointConfig, budget: Budget, top_k: int = 0) -> PromptScorer:
        """Return a scorer for the model at this URL, which ends with `/v1`."""
        client = ChatClient(TextAddress(model, url), config, budget, model, largest=LARGEST * (1 + top_k))
        return cls(client, top_k)

    async def score_all(self, prompts: Sequence[list[int]]) -> list[Scored]:
        """Return the answer to each prompt.

        Raises:
            RunEndedError: the server does not answer, or refuses a prompt, or the budget is spent.
        """
        tasks = [asyncio.ensure_future(self._score(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.close()

    async def check(self, tokenizer: Any) -> None:
        """Compare the server's texts of tokens with those of a tokenizer of Transformers: the tokens of a text, and
        others that are spread over the vocabulary.

        Raises:
            UserError: a token has another text, or the server does not answer as needed.
        """
        ids = [*tokenizer.encode(SAMPLE, add_special_tokens=False), *range(0, len(tokenizer), _stride(len(tokenizer)))]
        try:
            scored = await self._score(ids)
        finally:
            await self.client.close()
        for number, theirs in zip(ids, scored.texts, strict=True):
            ours, stored = tokenizer.decode([number]), tokenizer.convert_ids_to_tokens(number)
            # A token that is a part of a character has no text, and some tokenizers omit a space at the start. Some
            # servers give the token as the vocabulary stores it.
            if theirs is not None and "\ufffd" not in ours and theirs.strip() not in (ours.strip(), stored):
                raise UserError(
                    f"distillation.teacher.url={self.client.address.url} has another tokenizer than the policy (token "
                    f"{number} is {theirs!r} there and {ours!r} here); serve a teacher with the policy's tokenizer"
                )

    async def _score(self, prompt: list[int]) -> Scored:
        url, config = self.client.address.url, self.client.config
        asked: dict[str, Any] = {"echo": True, "logprobs": 1}
        answers, read = "echo=true with logprobs", partial(parse, count=len(prompt))
        if self.top_k:
            asked = {"prompt_logprobs": self.top_k}
            answers, read = f"prompt_logprobs={self.top_k}", partial(parse_top, prompt=prompt, k=self.top_k)
        asked |= {"max_tokens": 1, "temperature": 1.0, "model": self.client.address.model, "prompt": prompt}
        try:
            return (await self.client.request({**config.extra_body, **asked}, read)).value
        except NoAnswerError as error:
            fix = f"see that it runs and answers {answers}, or raise distillation.teacher.endpoint.retries"
            raise RunEndedError(
                f"the teacher at distillation.teacher.url={url} failed {error.attempts} times, the last time with "
                f"{error.problem.rstrip('.')}; {fix}"
            ) from error
        except StatusError as error:
            fix = "correct distillation.teacher.url, distillation.teacher.model or distillation.teacher.endpoint"
            if error.is_full:
                fix = f"it cannot hold the {len(prompt)} tokens of a conversation: lower generator.max_context_length"
            elif self.top_k and "logprobs" in error.text:
                fix = f"start it with --max-logprobs {self.top_k} or more, or lower distillation.top_k={self.top_k}"
            raise RunEndedError(
                f"the teacher at distillation.teacher.url={url} answered {error.problem}; {fix}"
            ) from error


def parse(body: bytes, count: int) -> Scored:
    """Return the first `count` tokens of an answer, which are the prompt.

    Raises:
        GarbledAnswerError: the answer does not have a log-prob for each of them.
    """
    try:
        found = json.loads(body)["choices"][0]["logprobs"]
        texts, logprobs = found["tokens"][:count], found["token_logprobs"][:count]
        read = [0.0, *(float(value) for value in logprobs[1:])]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise GarbledAnswerError("the answer has no log-probs of the prompt") from None
    if not len(texts) == len(read) == count or not all(isinstance(text, str) for text in texts):
        raise GarbledAnswerError(f"the answer has log-probs of {len(read)} tokens, and the prompt has {count}")
    _check_range(read)
    return Scored(texts, read, TopTokens(np.zeros((count, 0), dtype=np.int64), np.zeros((count, 0))))


def parse_top(body: bytes, prompt: Sequence[int], k: int) -> Scored:
    """Return the tokens of an answer with `prompt_logprobs`: for each token of the prompt but the first, a dict of the
    k most probable ids, and of the prompt's own if that is another one, with the log-prob and the text of each.

    Raises:
        GarbledAnswerError: the answer does not have the log-probs of each of them.
    """
    try:
        found = json.loads(body)["choices"][0]["prompt_logprobs"]
        places = [{int(name): entry for name, entry in place.items()} for place in found[1:]]
        values = [{token: float(entry["logprob"]) for token, entry in place.items()} for place in places]
        own = [(place[token], likely[token]) for token, place, likely in zip(prompt[1:], places, values, strict=True)]
        texts, logprobs = [entry.get("decoded_token") for entry, _ in own], [logprob for _, logprob in own]
        top = [sorted(likely.items(), key=lambda pair: -pair[1])[:k] for likely in values]
        pairs = np.array([[(0, 0.0)] * k, *top])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise GarbledAnswerError(
            f"the answer lacks the prompt_logprobs of a token, or some of the {k} that distillation.top_k needs"
        ) from None
    if not all(isinstance(text, str | None) for text in texts) or pairs[..., 0].min() < 0:
        raise GarbledAnswerError("the answer has a token that is no text, or a negative id")
    _check_range([*logprobs, *pairs[..., 1].flat])
    return Scored([None, *texts], [0.0, *logprobs], TopTokens(pairs[..., 0].astype(np.int64), pairs[..., 1]))


def _check_range(logprobs: Sequence[float]) -> None:
    if any(math.isnan(value) or value > ROUNDING for value in logprobs):
        raise GarbledAnswerError("the answer has a log-prob that is not a number up to 0")


def _stride(size: int) -> int:
    return max(1, size // COMPARED)
