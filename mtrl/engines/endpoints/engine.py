"""An engine for a model behind an OpenAI-compatible endpoint (`/v1/chat/completions`): messages in, messages out.

The endpoint returns no token ids, so such a model can be evaluated but not trained. `mtrl.rollout.chat` has the
conversation that belongs to this engine.
"""

from __future__ import annotations

import json
from typing import Any

from mtrl.config.endpoint_schema import EndpointConfig
from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.endpoints.budget import Budget, BudgetSpentError
from mtrl.engines.endpoints.chat_client import (
    MAX_REFUSED,
    Address,
    ChatClient,
    GarbledAnswerError,
    NoAnswerError,
    StatusError,
    api_key,
    check_bounds,
    check_key,
    usage_of,
)
from mtrl.engines.endpoints.wire import ChatGeneration, ChatPrompt, calls_from_wire, closed
from mtrl.errors import UserError
from mtrl.types import FinishReason
from mtrl.utils.http_client import MAX_MESSAGE_CHARACTERS

KEY = "evaluation.endpoint"
"""Section of the configuration for requests to endpoints."""
MOVED = frozenset({301, 302, 303, 307, 308, 404, 405, 410})
"""HTTP statuses which mean that the model is not at this address."""
HOPELESS = MOVED | {401, 402, 403, 429}
"""HTTP statuses that neither a retry nor another conversation can change. A 429 counts here when the account has no
credit left."""
SEEDS = 2**31
"""Number of seeds: a seed that is sent is below it."""


class EndpointError(RuntimeError):
    """The endpoint gave no usable answer. The message contains that of the server."""


class EndpointRefusedError(UserError):
    """No request to this endpoint can succeed."""


class EndpointEngine:
    """See `mtrl.engines.base.Engine`. Requests go through `ChatClient`.

    An episode fails if one of its turns gets no answer. An error that no retry can change ends all episodes: `refused`
    holds that error, and every later turn raises it at once.
    """

    def __init__(self, address: Address, config: EndpointConfig, budget: Budget | None = None, account: str = ""):
        """
        Args:
            budget: budget that all requests count against. None: a new one, which is not saved to a file.
            account: name under which the budget records the requests. Empty: the name of the model.

        Raises:
            UserError: the environment variable of the key holds no valid key, or the budget cannot be enforced.
        """
        self.address, self.config = address, config
        self.version = 0
        self.stats = EngineStats(extra={"requests": 0.0, "retries": 0.0})
        self._answered = False
        """Whether the endpoint has given a usable answer so far."""
        self._refused_ids: set[str] = set()
        """Ids of trajectories with a conversation that the endpoint refused."""
        self.budget = budget or Budget(KEY, config.price, config.budget)
        self._client = ChatClient(address, config, self.budget, account or address.model)
        check_key(config, f"{KEY}.api_key_env")
        check_bounds(self.request(ChatPrompt([]), SamplingParams()), self.budget, f"{KEY}.extra_body")

    @property
    def refused(self) -> UserError | None:
        """The error that every further turn raises; None while the endpoint can be used."""
        return self._client.closed

    def open(self, trajectory_id: str) -> None:
        """Do nothing: the engine has no state per trajectory."""

    async def generate(self, trajectory_id: str, prompt: ChatPrompt, sampling: SamplingParams) -> ChatGeneration:
        """Request one turn and add its tokens to the statistics.

        Raises:
            EndpointError: no attempt brought a usable answer.
            EndpointRefusedError: no request to this endpoint can succeed.
            BudgetSpentError: the rest of the budget is too small for another request.
        """
        try:
            generation = await self._request(trajectory_id, prompt, sampling)
        finally:
            self.stats.extra = {"requests": float(self._client.requests), "retries": float(self._client.retries)}
        self.stats.prompt_tokens += int(generation.usage.get("prompt_tokens", 0))
        self.stats.cached_tokens += int(generation.usage.get("cached_tokens", 0))
        self.stats.sampled_tokens += int(generation.usage.get("completion_tokens", 0))
        return generation

    def release(self, trajectory_id: str) -> None:
        """Do nothing: the engine has no state per trajectory."""

    async def load_weights(self, weights: Any, version: int) -> None:
        raise NotImplementedError("an endpoint has its own weights; train with generator.backend=local")

    async def close(self) -> None:
        await self._client.close()

    def request(self, prompt: ChatPrompt, sampling: SamplingParams) -> dict[str, Any]:
        """Return the body of a request. `extra_body` adds and overrides keys, and removes the keys whose value in it is
        null."""
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

    async def _request(self, trajectory_id: str, prompt: ChatPrompt, sampling: SamplingParams) -> ChatGeneration:
        try:
            answer = await self._client.request(self.request(prompt, sampling), as_completion)
        except NoAnswerError as error:
            raise EndpointError(
                f"{self.address} gave no answer in {error.attempts} attempts, the last time: {error.problem}"
            ) from error
        except BudgetSpentError as error:
            self._client.closed = error
            raise
        except StatusError as error:
            self._check_full(error, trajectory_id, prompt)
            generation, attempts = ChatGeneration([], [], FinishReason.LENGTH, [], is_full=True), error.attempts
        else:
            self._answered = True
            generation, attempts = read_answer(answer.value, sampling.stop), answer.attempts
        generation.usage["retries"] = float(attempts - 1)
        return generation

    def _check_full(self, error: StatusError, trajectory_id: str, prompt: ChatPrompt) -> None:
        """Return if the error says that the context is full, after at least one turn.

        Raises:
            EndpointRefusedError, EndpointError: the error has another cause, or the first prompt is too long.
        """
        if error.is_full:
            if any(message["role"] == "assistant" for message in prompt.messages):
                return
            raise EndpointError(
                f"{self.address} has no room for the first prompt of this conversation: {error.problem}; serve the "
                "model with a longer context, or leave the row out"
            )
        self._refused_ids.add(trajectory_id)
        is_ours = not self._answered and len(self._refused_ids) >= MAX_REFUSED
        if error.status in HOPELESS or is_ours:
            refusal = f"{self.address} refused: {error.problem}; {self._advice(error.status)}"
            self._client.closed = EndpointRefusedError(refusal)
            raise self._client.closed
        advice = "" if self._answered else f"; if it refuses all, {self._advice(error.status)}"
        raise EndpointError(f"{self.address} refused this conversation: {error.problem}{advice}")

    def _advice(self, status: int) -> str:
        variable = self.config.api_key_env
        if status in (401, 403):
            state = "check the key in it" if api_key(self.config) else "it is not set"
            return f"{KEY}.api_key_env={variable} names the environment variable of the key: {state}"
        if status in MOVED:
            return "check the name of the model and the address, which ends with /v1: MODEL@http://HOST:PORT/v1"
        if status in (402, 429):
            return "the account of the key has no credit left"
        return f"change what is sent by {KEY}.extra_body, where null leaves a key out"


def as_completion(content: bytes) -> dict[str, Any]:
    """Parse an answer. Question marks replace unpaired surrogates, which cannot be written to a file.

    Raises:
        GarbledAnswerError: the answer is not a chat completion.
    """
    try:
        answer = json.loads(content)
        message = answer["choices"][0]["message"]
        if not isinstance(message, dict) or not isinstance(message.get("content"), str | list | None):
            raise TypeError
        return json.loads(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, LookupError, TypeError, RecursionError):
        text = content[:MAX_MESSAGE_CHARACTERS].decode(errors="replace")
        raise GarbledAnswerError(f"the answer is not a chat completion: {text}") from None


def read_answer(answer: dict[str, Any], stop: tuple[str, ...]) -> ChatGeneration:
    """Convert an answer in OpenAI's format to a turn."""
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
        content=content if cut or calls else with_stop(content, choice, stop),
        reasoning=reasoning if isinstance(reasoning, str) else None,
        calls=calls,
        usage=usage_of(answer),
    )


def with_stop(content: str, choice: dict[str, Any], stop: tuple[str, ...]) -> str:
    """Return the content with the stop string at its end, if one was reached.

    The engines of mtrl keep the stop string, whereas APIs remove it. vLLM and SGLang report which one was reached, or
    that the model ended the turn itself, by null and by the id of its end token; for other servers it is guessed.
    """
    reports = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]
    for reached in reports:
        if isinstance(reached, str) and reached in stop:
            return content if content.endswith(reached) else content + reached
    if any(reached is None or isinstance(reached, int) for reached in reports):
        return content
    return closed(content, stop)


def plain_text(content: Any) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""
