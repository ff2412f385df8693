"""One trajectory that a program runs: its calls to the model, its end and its rewards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mtrl.config.engine_schema import CALL_KINDS
from mtrl.engines.base import Engine, EngineLostError, SamplingParams
from mtrl.gateway.calls import CallContext, CallTree, ModelCall, turns_of
from mtrl.gateway.conversations import kinds_of, rewards_of
from mtrl.gateway.exchange import RequestError
from mtrl.gateway.requests import BaseRequest, ChatRequest, CompletionRequest
from mtrl.rollout.conversation import Codec
from mtrl.rollout.rollouts import all_or_none
from mtrl.types import LARGEST_REWARD, FinishReason, Generation, Message, StopReason, Turn

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 32
"""Upper bound of the average number of characters per token in any text."""


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one trajectory."""

    max_calls: int
    """Maximum number of answers."""
    max_calls_at_once: int
    """Maximum number of answers that are sampled at the same time; further calls wait."""
    max_context_length: int
    """Maximum length of a context in tokens; the request must leave at least one token of it for the answer."""
    max_requests_per_second: float = 100.0
    """Maximum rate of requests of any kind, per second; further requests are refused with 429 and may be repeated."""
    leave_out: tuple[str, ...] = ()
    """Kinds of calls that become no turns, of `CALL_KINDS`."""


class TooLongError(RequestError):
    """A request whose context leaves no room for an answer."""


class Session:
    """One trajectory that a program runs: its requests, the sampled answers and the rewards.

    Call k samples with seed `sampling.seed + k`, as turn k of the episode loop does, and with the run's own temperature
    and top-p. Agents that set `temperature=0` can therefore be trained; a metric counts the overridden calls.

    In the engine, one call uses the trajectory with the session's name, and every concurrent call uses another one.
    Between calls one engine trajectory stays open, with its cache. No idle one stays open while other calls are
    sampled, because a deterministic engine waits until every open trajectory has requested its next turn.
    """

    def __init__(
        self, name: str, engine: Engine, codec: Codec, sampling: SamplingParams, limits: SessionLimits, token: str
    ):
        self.name, self.token = name, token
        self.engine, self.codec, self.sampling, self.limits = engine, codec, sampling, limits
        self.finished = asyncio.Event()
        """Set when the program has reported its end, or when the engine is lost, so that no call can be answered."""
        self.status: str | None = None
        """Final status that the program reported: ready or failed; None before the report."""
        self.error: str | None = None
        """Error message that the program reported with its status."""
        self.stop_reason: StopReason | None = None
        """Stop reason of the trajectory that the last refused call implies, if any; None after an accepted call."""
        self.failure: Exception | None = None
        """Latest exception while a call was answered. `EngineLostError` must reach the loop that runs the episode."""
        self.rewards: list[float] | None = None
        """Rewards of the program's latest report; None before the first."""
        self.rewards_reported = asyncio.Event()
        """Set when the program has reported rewards."""
        self.metrics: Counter[str] = Counter()
        """Counts: `gateway/overridden` (calls whose sampling parameters the run overrode), `gateway/gone` (calls whose
        client disconnected before the answer), `gateway/beside` (calls that began while another request ran; their
        order, and so their samples, depend on time), `gateway/unknown_fields`, and after `turns` `gateway/KIND_calls`
        for each of `CALL_KINDS`."""
        self.stored_messages: dict[str, list[Message]] = {}
        """Conversations that a later request may continue by naming their response (`responses.py`), by its id."""
        self.closed = False
        self._call_tree = CallTree(codec)
        self._calls: list[ModelCall] = []
        """Calls that were answered."""
        self._started_calls = self._running_calls = 0
        self._sampling_slots = asyncio.Semaphore(limits.max_calls_at_once)
        self._engine_ids: set[str] = {name}
        """Ids of the trajectories that are open in the engine."""
        self._idle_engine_id: str | None = name
        engine.open(name)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest | CompletionRequest) -> list[ModelCall]:
        """Answer a request of either kind; see `chat` and `complete`."""
        return await (self.chat(request) if isinstance(request, ChatRequest) else self.complete(request))

    async def chat(self, request: ChatRequest) -> list[ModelCall]:
        """Continue a conversation; return one call for each of `request.n` answers.

        If the caller is cancelled, its calls are discarded and become no turns.

        Raises:
            RequestError: 400 the messages are refused or leave no room for an answer; 410 the trajectory is over; 429
                the trajectory has used all its calls; 500 the call failed; 503 the engine is lost, or sampling was
                aborted.
        """
        return await self._answers(request, partial(self._chat_context, request))

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the context that `chat` would sample from; it raises the same errors, except
        those of sampling. It is no call, so the trajectory's stop reason stays."""
        self._check_open()
        return len(self._chat_context(request).ids)

    def _chat_context(self, request: ChatRequest) -> CallContext:
        self._check_length(len(request.messages), f"{len(request.messages)} messages")
        self._check_characters(request.characters)
        try:
            return self._call_tree.chat(request.messages, request.tools)
        except Exception as error:  # a template may refuse messages with any exception
            first_line = next(iter(str(error).splitlines()), "")
            message = f"the chat template refuses these messages ({type(error).__name__}: {first_line:.200})"
            raise RequestError(400, message, param="messages") from error

    async def complete(self, request: CompletionRequest) -> list[ModelCall]:
        """Continue a text or token ids, without a template; it raises the same errors as `chat`."""
        return await self._answers(request, partial(self._completion_context, request))

    def _completion_context(self, request: CompletionRequest) -> CallContext:
        if isinstance(request.prompt, str):
            self._check_characters(len(request.prompt))
            return self._call_tree.text(request.prompt)
        self._check_length(len(request.prompt), f"{len(request.prompt)} tokens")
        if (largest := max(request.prompt)) >= len(self.codec.tokenizer):
            raise RequestError(400, f"prompt has the id {largest}, beyond the vocabulary", param="prompt")
        return self._call_tree.tokens(request.prompt)

    async def _answers(self, request: BaseRequest, make_context: Callable[[], CallContext]) -> list[ModelCall]:
        self._check_call_limit(request.n)
        try:
            context = make_context()
            self._check_context(context)
        except TooLongError:
            self.stop_reason = StopReason.CONTEXT_LIMIT
            raise
        self.stop_reason = None
        self.metrics["gateway/unknown_fields"] += len(request.unknown)
        if self._running_calls:
            self.metrics["gateway/beside"] += request.n
        calls = [self._start_call(context, choice, request) for choice in range(request.n)]
        try:
            await all_or_none(self._answer(call, context, request) for call in calls)
        except BaseException as error:
            if context.parent is not None:
                context.parent.children -= len(calls)
            if isinstance(error, asyncio.CancelledError):
                self.metrics["gateway/gone"] += len(calls)
            raise
        finally:
            self._running_calls -= len(calls)
        for call in calls:
            self._call_tree.add(call, context.history)
            self.metrics["gateway/overridden"] += bool(call.overrides)
        self._calls += calls
        return calls

    def _start_call(self, context: CallContext, choice: int, request: BaseRequest) -> ModelCall:
        requested = {"temperature": request.temperature, "top_p": request.top_p}
        overrides = tuple(k for k, v in requested.items() if v is not None and v != getattr(self.sampling, k))
        call = ModelCall(self._started_calls, context, choice, overrides)
        self._started_calls += 1
        self._running_calls += 1
        if context.parent is not None:
            context.parent.children += 1
        return call

    async def _answer(self, call: ModelCall, context: CallContext, request: BaseRequest) -> None:
        async with self._sampling_slots:
            self._check_open()
            call.began = time.perf_counter()
            generation = await self._sample(context.ids, self._sampling(call.index, request))
            call.ended = time.perf_counter()
        try:
            call.answer(generation, self.codec, context, request)
        except Exception as error:
            self.stop_reason, self.failure = StopReason.PARSE_ERROR, error
            raise RequestError(500, "the sampled tokens cannot be parsed into a message") from error

    def _sampling(self, index: int, request: BaseRequest) -> SamplingParams:
        params = self.sampling
        limit = params.max_generate_length
        return replace(
            params,
            seed=(params.seed + index) % 2**64,
            max_generate_length=limit if request.max_tokens is None else min(limit, request.max_tokens),
            stop=tuple(dict.fromkeys([*params.stop, *request.stop])),
        )

    async def _sample(self, ids: list[int], sampling: SamplingParams) -> Generation:
        engine_id = self._acquire_engine_id()
        generation = None
        try:
            generation = await self.engine.generate(engine_id, ids, sampling)
        except EngineLostError as error:
            self.failure = error
            self.finished.set()
            raise RequestError(503, "the engine is lost, and the run ends") from error
        except Exception as error:
            log.warning("a call of %s failed", self.name, exc_info=True)
            self.failure = error
            raise RequestError(500, f"sampling failed ({type(error).__name__})") from error
        finally:
            self._return_engine_id(engine_id, keep=generation is not None)
        self._check_open()
        if generation.finish == FinishReason.ABORT:
            self.stop_reason = StopReason.ABORTED
            raise RequestError(503, "sampling was aborted")
        return generation

    def _acquire_engine_id(self) -> str:
        """Return the id of an engine trajectory for one call; open one if none is idle."""
        if self._idle_engine_id is not None:
            engine_id, self._idle_engine_id = self._idle_engine_id, None
            return engine_id
        number = next(i for i in range(len(self._engine_ids) + 1) if self._engine_id(i) not in self._engine_ids)
        engine_id = self._engine_id(number)
        self._engine_ids.add(engine_id)
        self.engine.open(engine_id)
        return engine_id

    def _return_engine_id(self, engine_id: str, keep: bool) -> None:
        """Release the engine trajectory of a finished call, or hold it for the next call if no other one is running."""
        if self.closed:  # `close` has released it
            return
        if keep and len(self._engine_ids) == 1:
            self._idle_engine_id = engine_id
        else:
            self._engine_ids.remove(engine_id)
            self.engine.release(engine_id)

    def _engine_id(self, number: int) -> str:
        return f"{self.name}#{number}" if number else self.name

    def _check_open(self) -> None:
        if self.closed:  # the managed service's SDK recognises the words of this message and stops reporting
            message = f"trajectory {self.name} is not in valid status: it is over"
            raise RequestError(410, message, "trajectory_over")

    def _check_call_limit(self, calls: int) -> None:
        self._check_open()
        if len(self._calls) + self._running_calls + calls > self.limits.max_calls:
            self.stop_reason = StopReason.MAX_TURNS
            message = f"this trajectory may call the model {self.limits.max_calls} times (generator.agent.max_calls)"
            raise RequestError(429, message, "max_calls")

    def _check_length(self, min_tokens: float, length: str) -> None:
        """Refuse a request of at least `min_tokens` tokens that cannot fit, before it is encoded, which would delay
        other requests."""
        if min_tokens > self.limits.max_context_length:
            raise self._too_long(length)

    def _check_characters(self, characters: int) -> None:
        self._check_length(characters / CHARACTERS_PER_TOKEN, f"{characters} characters")

    def _check_context(self, context: CallContext) -> None:
        if len(context.ids) >= self.limits.max_context_length:
            raise self._too_long(f"{len(context.ids)} tokens")
        if not context.ids:
            raise RequestError(400, "prompt has no tokens", param="prompt")

    def _too_long(self, length: str) -> TooLongError:
        message = f"this model's maximum context length is {self.limits.max_context_length} tokens, of which the "
        message += f"answer needs one; the request has {length}"
        return TooLongError(400, message, "context_length_exceeded", "messages")

    # -- the end ------------------------------------------------------------------------------------------------------

    def set_rewards(self, rewards: float | Sequence[float]) -> None:
        """Set the trajectory's reward: one value, or one value per call so far, in the order in which the calls began.
        The latest report counts.

        Raises:
            RequestError: 400 a value is not finite or too large, or their number is wrong; 410 the trajectory is over.
        """
        self._check_open()
        values = [float(v) for v in ([rewards] if isinstance(rewards, int | float) else rewards)]
        calls = self._calls_in_order()
        if not all(abs(value) < LARGEST_REWARD for value in values):
            raise RequestError(400, f"rewards must be finite numbers below {LARGEST_REWARD:g}", param="rewards")
        if len(values) not in (1, len(calls)):
            message = (
                f"there are {len(values)} rewards for {len(calls)} calls of the model; report one, or one for each"
            )
            raise RequestError(400, message, param="rewards")
        for index, call in enumerate(calls):
            call.reward = values[index] if len(values) > 1 else 0.0
        self.rewards = values
        self.rewards_reported.set()

    def finish(self, status: str, error: str | None = None) -> None:
        """Record the program's end with the status ready or failed. Only the first report counts."""
        if self.status is None:
            self.status, self.error = status, error
        self.finished.set()

    def turns(self) -> list[Turn]:
        """Return the turns of the answered calls with their rewards; a single reward goes to the last turn."""
        calls = self._calls_in_order()
        kinds = kinds_of(calls)
        for kind in CALL_KINDS:
            self.metrics[f"gateway/{kind}_calls"] = sum(found == kind for found in kinds.values())
        kept = [call for call in calls if kinds[call] not in self.limits.leave_out]
        turns = turns_of(kept)
        for turn, reward in zip(turns, rewards_of(calls, kept), strict=True):
            turn.reward = reward
        if turns and self.rewards is not None and len(self.rewards) == 1:
            turns[-1].reward = self.rewards[0]
        return turns

    def close(self) -> None:
        """Release all engine trajectories, which aborts running calls; later requests are refused."""
        if self.closed:
            return
        self.closed = True
        for engine_id in sorted(self._engine_ids):
            self.engine.release(engine_id)

    def _calls_in_order(self) -> list[ModelCall]:
        return sorted(self._calls, key=lambda call: call.index)
