"""A model behind an OpenAI-compatible endpoint (`/v1/chat/completions`): messages in, messages out.

No token ids come back, so such a model can be evaluated and not trained. Paired with `mtrl.generator.chat`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from mtrl.config.schema import EndpointConfig
from mtrl.errors import UserError
from mtrl.generator.chat import ChatGeneration, ChatPrompt, calls_from_wire, closed
from mtrl.generator.engines.base import EngineStats, SamplingParams
from mtrl.tracking.text import one_line
from mtrl.types import FinishReason

log = logging.getLogger(__name__)

RETRIED = frozenset({408, 409, 425, 429})
"""Answers below 500 that say to try again."""
MOVED = frozenset({301, 302, 303, 307, 308, 404, 405, 410})
"""Answers that say that the model is not there."""
HOPELESS = MOVED | {401, 402, 403}
"""Answers that no repetition and no other conversation mends."""
SUSPECT = 3
"""So many conversations that are refused before the first good answer are the fault of the settings, not theirs."""
SPENT = ("insufficient_quota", "billing")
"""Words of a 429 that waiting does not mend."""
FULL = ("context_length_exceeded", "maximum context length", "context length", "context window")
"""Words of a 400 about a conversation that has become too long."""
FIRST_PAUSE = 0.5
"""Seconds before the first repetition; each further one waits twice as long, more or less by a random half."""
LONGEST_PAUSE = 60.0
LONGEST_WAIT = 300.0
"""At most so many seconds are waited when it is the server that names them."""
SHOWN = 300
"""Characters of the server's own words in an error."""
SEEDS = 2**31
LARGEST = 2**24
"""Bytes of an answer that are read; no honest one comes near."""
MOST_TOKENS = 2**40
"""A count above this is none."""


class EndpointError(RuntimeError):
    """The endpoint gave no usable answer; the sentence holds the server's own words."""


class EndpointRefusedError(UserError):
    """Nothing that is sent to this endpoint can work."""


@dataclass(frozen=True)
class Address:
    """Which model, and where."""

    model: str
    url: str
    """Up to and with `/v1`."""

    @property
    def completions(self) -> str:
        return f"{self.url.rstrip('/')}/chat/completions"


class EndpointEngine:
    """See `mtrl.generator.engines.base.Engine`. At most `max_concurrent` requests are on their way at once.

    A request that fails is repeated `retries` times, after a pause that doubles or the one that the server names; then
    its episode fails. What no repetition mends ends everything: `refused` holds the sentence, and every later turn
    raises it at once.
    """

    def __init__(self, address: Address, config: EndpointConfig):
        """
        Raises:
            UserError: the environment variable of the key holds no key.
        """
        self.address, self.config = address, config
        self.version = 0
        self.stats = EngineStats(extra={"requests": 0.0, "retries": 0.0})
        self.refused: EndpointRefusedError | None = None
        self._answered = False
        """Whether it has ever given a good answer."""
        self._turned_away: set[str] = set()
        """Trajectories with a conversation that was refused."""
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._random = random.Random()
        if not (self._key().isascii() and self._key().isprintable()):
            raise UserError(f"evaluation.endpoint.api_key_env={config.api_key_env}: this variable holds no API key")

    def open(self, trajectory_id: str) -> None:
        """Nothing is kept between turns."""

    async def generate(self, trajectory_id: str, prompt: ChatPrompt, sampling: SamplingParams) -> ChatGeneration:
        """
        Raises:
            EndpointError: no good answer after all repetitions.
            EndpointRefusedError: there will never be one.
        """
        body = self.request(prompt, sampling)
        async with self._slots:
            answer, retries = await self._ask(body, trajectory_id)
        if answer is None:
            generation = ChatGeneration([], [], FinishReason.LENGTH, [], is_full=True)
        else:
            generation = read_answer(answer, sampling.stop)
        generation.usage["retries"] = float(retries)
        self.stats.prompt_tokens += int(generation.usage.get("prompt_tokens", 0))
        self.stats.cached_tokens += int(generation.usage.get("cached_tokens", 0))
        self.stats.sampled_tokens += int(generation.usage.get("completion_tokens", 0))
        return generation

    def release(self, trajectory_id: str) -> None:
        """Nothing is kept between turns."""

    async def load_weights(self, weights: Any, version: int) -> None:
        raise NotImplementedError("an endpoint has its own weights; train with generator.backend=local")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def request(self, prompt: ChatPrompt, sampling: SamplingParams) -> dict[str, Any]:
        """The body of a request. `extra_body` adds keys, changes them, and takes those away that it gives as null."""
        body: dict[str, Any] = {
            "model": self.address.model,
            "messages": prompt.messages,
            "max_tokens": sampling.max_generate_length,
            "temperature": sampling.temperature,
        }
        if prompt.tools:
            body["tools"] = prompt.tools
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.temperature > 0:
            body["seed"] = sampling.seed % SEEDS
            if sampling.top_p < 1:
                body["top_p"] = sampling.top_p
            if sampling.top_k > 0:
                body["top_k"] = sampling.top_k
        body |= {str(key): value for key, value in self.config.extra_body.items()}
        return {key: value for key, value in body.items() if value is not None}

    # -- one request -------------------------------------------------------------------------------------------------

    async def _ask(self, body: dict[str, Any], trajectory_id: str) -> tuple[dict[str, Any] | None, int]:
        """The answer, or None where the context is full; and how often the request was repeated."""
        problem = ""
        for attempt in range(self.config.retries + 1):
            if self.refused is not None:
                raise self.refused
            self.stats.extra["requests"] += 1
            self.stats.extra["retries"] += attempt > 0
            pause = min(FIRST_PAUSE * 2**attempt * self._random.uniform(0.5, 1.5), LONGEST_PAUSE)
            try:
                response = await self._post(body)
                if response.status_code == 200:
                    answer = as_completion(response.content)
                    self._answered = True
                    return answer, attempt
                problem = self._told(response)
                if self._is_full(response, problem, trajectory_id):
                    return None, attempt
                pause = max(pause, min(retry_after(response), LONGEST_WAIT))
            except (httpx.HTTPError, TimeoutError, httpx.InvalidURL, GarbledAnswerError) as error:
                problem = self._words(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            log.info("%s: attempt %d failed: %s", self.address.url, attempt + 1, problem)
            if attempt < self.config.retries:
                await asyncio.sleep(pause)
        raise EndpointError(
            f"{self.address.model}@{self.address.url} gave no answer in {self.config.retries + 1} attempts, the last "
            f"time: {problem}"
        )

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        """With one limit of time for the whole answer, since a server may send it one byte at a time; and one of size.

        Raises:
            GarbledAnswerError: it is larger.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=self.config.timeout, limits=httpx.Limits(max_connections=self.config.max_concurrent)
            )
        async with asyncio.timeout(self.config.timeout):
            asked = self._client.stream("POST", self.address.completions, json=body, headers=self._headers())
            async with asked as response:
                content = bytearray()
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > LARGEST:
                        raise GarbledAnswerError(f"the answer is larger than {LARGEST:,} bytes")
        kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
        return httpx.Response(response.status_code, headers=kept, content=bytes(content))

    def _is_full(self, response: httpx.Response, problem: str, trajectory_id: str) -> bool:
        """What an answer other than 200 means: that the context is full, or (False) that it can be tried again.

        Raises:
            EndpointRefusedError, EndpointError: it cannot.
        """
        status, said = response.status_code, response.text.casefold()
        if status >= 500 or (status in RETRIED and not any(word in said for word in SPENT)):
            return False
        if status in (400, 413, 422) and any(word in said for word in FULL):
            return True
        where = f"{self.address.model}@{self.address.url}"
        self._turned_away.add(trajectory_id)
        is_ours = not self._answered and len(self._turned_away) >= SUSPECT
        if status in HOPELESS or status in RETRIED or is_ours:
            self.refused = EndpointRefusedError(f"{where} refused: {problem}; {self._advice(status)}")
            raise self.refused
        advice = "" if self._answered else f"; if it refuses all, {self._advice(status)}"
        raise EndpointError(f"{where} refused this conversation: {problem}{advice}")

    def _advice(self, status: int) -> str:
        variable = self.config.api_key_env
        if status in (401, 403):
            state = "check the key in it" if self._key() else "it is not set"
            return f"evaluation.endpoint.api_key_env={variable} names the environment variable of the key: {state}"
        if status in MOVED:
            return "check the name of the model and the address, which ends with /v1: MODEL@http://HOST:PORT/v1"
        if status in (402, 429):
            return "the account of the key is used up"
        return "change what is sent by evaluation.endpoint.extra_body, where null leaves a key out"

    def _told(self, response: httpx.Response) -> str:
        """Status and the server's own words."""
        try:
            body = response.json()
            error = body.get("error", body)
            said = error.get("message", error) if isinstance(error, dict) else error
            said = said if isinstance(said, str) else json.dumps(said)
        except (ValueError, AttributeError, RecursionError):
            said = response.text
        return self._words(f"HTTP {response.status_code} {said}".strip())

    def _words(self, text: str) -> str:
        """Words of a stranger, fit for a line of a terminal, and without our key should they repeat it."""
        if key := self._key():
            text = text.replace(key, "***")
        return one_line(" ".join(text.split()), SHOWN)

    def _headers(self) -> dict[str, str]:
        key = self._key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _key(self) -> str:
        return os.environ.get(self.config.api_key_env, "").strip() if self.config.api_key_env else ""


class GarbledAnswerError(ValueError):
    """Status 200, and yet no chat completion."""


def as_completion(content: bytes) -> dict[str, Any]:
    """The answer; halves of surrogate pairs in it, which no file takes, are question marks.

    Raises:
        GarbledAnswerError: it is no chat completion.
    """
    try:
        answer = json.loads(content)
        message = answer["choices"][0]["message"]
        if not isinstance(message, dict) or not isinstance(message.get("content"), str | list | None):
            raise TypeError
        return json.loads(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, LookupError, TypeError, RecursionError):
        said = content[:SHOWN].decode(errors="replace")
        raise GarbledAnswerError(f"the answer is no chat completion: {said}") from None


def read_answer(answer: dict[str, Any], stop: tuple[str, ...]) -> ChatGeneration:
    """From OpenAI's answer to a turn."""
    choice = answer["choices"][0]
    message = choice["message"]
    cut = choice.get("finish_reason") == "length"
    calls = calls_from_wire(message.get("tool_calls"))
    content = plain_text(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return ChatGeneration(
        token_ids=[],
        logprobs=[],
        finish=FinishReason.LENGTH if cut else FinishReason.STOP,
        version_spans=[],
        content=content if cut or calls else closed(content, stop),
        reasoning=reasoning if isinstance(reasoning, str) else None,
        calls=calls,
        usage=usage_of(answer),
    )


def plain_text(content: Any) -> str:
    """Text, or the texts of a list of parts."""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""


def usage_of(answer: dict[str, Any]) -> dict[str, float]:
    """Tokens by the provider's count; a count that is missing or no number is 0."""
    usage = answer.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = {"cached_tokens": cached, **{k: usage.get(k) for k in ("prompt_tokens", "completion_tokens")}}
    return {name: _count(count) for name, count in counts.items()}


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, as a number or as a date; 0 where it does not say."""
    said = response.headers.get("retry-after", "")
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(said).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _count(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MOST_TOKENS else 0.0
