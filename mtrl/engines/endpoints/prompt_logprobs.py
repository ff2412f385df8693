"""Log-probs of given tokens from an OpenAI-compatible completions server (`/v1/completions`).

A request has token ids as its prompt, `echo=true` and `logprobs=1`, which vLLM and SGLang answer with the log-prob of
each token of the prompt at temperature 1. One token is sampled in addition, since not every server takes
`max_tokens=0`, and ignored.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.engines.endpoints.budget import Budget
from mtrl.engines.endpoints.chat_client import Address, ChatClient, GarbledAnswerError, NoAnswerError, StatusError
from mtrl.errors import RunEndedError, UserError
from mtrl.models.tokenizer_difference import SAMPLE

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
    """The tokens of a prompt, as a server read them."""

    texts: list[str]
    """Text of each token."""
    logprobs: list[float]
    """Log-prob of each token given those before it; 0 for the first, which has none."""


@dataclass
class PromptScorer:
    """Asks a server for the log-probs of prompts."""

    client: ChatClient

    @classmethod
    def at(cls, url: str, model: str, config: EndpointConfig, budget: Budget) -> PromptScorer:
        """Return a scorer for the model at this URL, which ends with `/v1`."""
        return cls(ChatClient(TextAddress(model, url), config, budget, model))

    async def score_all(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Return the log-prob of each token of each prompt, 0 for the first token of a prompt.

        Raises:
            RunEndedError: the server does not answer, or refuses a prompt, or the budget is spent.
        """
        tasks = [asyncio.ensure_future(self._score(prompt)) for prompt in prompts]
        try:
            return [scored.logprobs for scored in await asyncio.gather(*tasks)]
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
            if "\ufffd" not in ours and theirs.strip() not in (ours.strip(), stored):
                raise UserError(
                    f"distillation.teacher.url={self.client.address.url} has another tokenizer than the policy (token "
                    f"{number} is {theirs!r} there and {ours!r} here); serve a teacher with the policy's tokenizer"
                )

    async def _score(self, prompt: list[int]) -> Scored:
        url, config = self.client.address.url, self.client.config
        asked = {"max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 1.0}
        body = {**config.extra_body, "model": self.client.address.model, "prompt": prompt, **asked}
        try:
            return (await self.client.request(body, partial(parse, count=len(prompt)))).value
        except NoAnswerError as error:
            fix = "see that it runs and answers echo=true with logprobs, or raise distillation.teacher.endpoint.retries"
            raise RunEndedError(
                f"the teacher at distillation.teacher.url={url} failed {error.attempts} times, the last time with "
                f"{error.problem.rstrip('.')}; {fix}"
            ) from error
        except StatusError as error:
            fix = "correct distillation.teacher.url, distillation.teacher.model or distillation.teacher.endpoint"
            if error.is_full:
                fix = f"it cannot hold the {len(prompt)} tokens of a conversation: lower generator.max_context_length"
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
    if any(math.isnan(value) or value > ROUNDING for value in read):
        raise GarbledAnswerError("the answer has a log-prob that is not a number up to 0")
    return Scored(texts, read)


def _stride(size: int) -> int:
    return max(1, size // COMPARED)
