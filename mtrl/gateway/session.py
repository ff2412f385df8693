"""One trajectory that a program plays: its calls to the model, its end and what it is paid."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtrl.gateway.calls import Call, Context, Lineage, arrange
from mtrl.gateway.errors import RequestError
from mtrl.gateway.requests import ChatRequest, CompletionRequest, Wishes
from mtrl.generator.conversation import Codec
from mtrl.generator.engines.base import Engine, EngineLostError, Generation, SamplingParams
from mtrl.generator.rollouts import all_or_none
from mtrl.types import LARGEST_REWARD, FinishReason, StopReason, Turn

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 32
"""No text has so many on average."""


@dataclass(frozen=True)
class SessionLimits:
    """What one trajectory may take."""

    max_calls: int
    """Answers in all."""
    max_calls_at_once: int
    """Answers that are sampled at the same time; further ones wait."""
    max_context_length: int
    """Tokens of a context, its answer included."""
    max_requests_per_second: float = 100.0
    """Of any kind; further ones are refused, and may come again."""


class Session:
    """One trajectory that a program plays: what it asked, what was sampled, what it was paid.

    Call k samples with seed `sampling.seed + k`, as turn k of the episode loop does, and under the run's own
    temperature and top-p: agents with `temperature=0` written in them can be trained, and what they wished is counted.

    To the engine the trajectory is one of its name while one call is under way, and one more for every call beside it.
    Between calls one stays open, with its cache; while others are sampled none does, for a deterministic engine waits
    until every open one has asked for its next turn.
    """

    def __init__(
        self, name: str, engine: Engine, codec: Codec, sampling: SamplingParams, limits: SessionLimits, token: str
    ):
        self.name, self.token = name, token
        self.engine, self.codec, self.sampling, self.limits = engine, codec, sampling, limits
        self.finished = asyncio.Event()
        """The program said that it is done, or no call can be answered any more."""
        self.status: str | None = None
        """What the program said of its end: ready or failed; None before."""
        self.error: str | None = None
        """What it said about why it failed."""
        self.stop: StopReason | None = None
        """Why the last call was refused, if the trajectory should end for that; None after one that was not."""
        self.failure: Exception | None = None
        """What broke while a call was answered, the newest: `EngineLostError` must reach whoever plays the episode."""
        self.rewards: list[float] | None = None
        """What the program reported last."""
        self.paid = asyncio.Event()
        """There are rewards."""
        self.metrics: Counter[str] = Counter()
        """Calls whose wishes were `gateway/overridden`, that were `gone` before their answers, and that began `beside`
        another request (which of these is first, and so what each samples, is a matter of time); `unknown_fields`."""
        self.closed = False
        self._lineage = Lineage(codec)
        self._calls: list[Call] = []
        """Those whose clients have their answers."""
        self._begun = self._under_way = 0
        self._places = asyncio.Semaphore(limits.max_calls_at_once)
        self._engine_ids: set[str] = {name}
        """Open in the engine."""
        self._idle: str | None = name
        engine.open(name)

    # -- calls --------------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> list[Call]:
        """Go on with a conversation; one call for each of `request.n` answers.

        A caller that is cancelled takes its calls back: they are no turns.

        Raises:
            RequestError: 400 the messages are refused or leave no room for an answer; 410 the trajectory is over; 429
                it had its calls; 500 the call failed; 503 the engine is lost.
        """
        self._check_room(request.n)
        self._check_length(len(request.messages), f"{len(request.messages)} messages")
        self._check_characters(request.characters)
        try:
            context = self._lineage.chat(request.messages, request.tools)
        except Exception as error:  # whatever a template raises of messages that it does not like
            first_line = next(iter(str(error).splitlines()), "")
            message = f"the chat template refuses these messages ({type(error).__name__}: {first_line:.200})"
            raise RequestError(400, message, param="messages") from error
        return await self._answers(request, context)

    async def complete(self, request: CompletionRequest) -> list[Call]:
        """Go on with a text or with token ids, without a template; raises what `chat` does."""
        self._check_room(request.n)
        if isinstance(request.prompt, str):
            self._check_characters(len(request.prompt))
            context = self._lineage.text(request.prompt)
        else:
            self._check_length(len(request.prompt), f"{len(request.prompt)} tokens")
            if (largest := max(request.prompt)) >= len(self.codec.tokenizer):
                raise RequestError(400, f"prompt has the id {largest}, beyond the vocabulary", param="prompt")
            context = self._lineage.tokens(request.prompt)
        return await self._answers(request, context)

    async def _answers(self, request: Wishes, context: Context) -> list[Call]:
        self._check_context(context)
        self.stop = None
        self.metrics["gateway/unknown_fields"] += len(request.unknown)
        if self._under_way:
            self.metrics["gateway/beside"] += request.n
        calls = [self._begin(context, choice, request) for choice in range(request.n)]
        try:
            await all_or_none(self._answer(call, context, request) for call in calls)
        except BaseException as error:
            if context.parent is not None:
                context.parent.children -= len(calls)
            if isinstance(error, asyncio.CancelledError):
                self.metrics["gateway/gone"] += len(calls)
            raise
        finally:
            self._under_way -= len(calls)
        for call in calls:
            self._lineage.learn(call, context.history)
            self.metrics["gateway/overridden"] += bool(call.overrides)
        self._calls += calls
        return calls

    def _begin(self, context: Context, choice: int, request: Wishes) -> Call:
        wished = {"temperature": request.temperature, "top_p": request.top_p}
        overrides = tuple(k for k, v in wished.items() if v is not None and v != getattr(self.sampling, k))
        call = Call(self._begun, context, choice, overrides)
        self._begun += 1
        self._under_way += 1
        if context.parent is not None:
            context.parent.children += 1
        return call

    async def _answer(self, call: Call, context: Context, request: Wishes) -> None:
        async with self._places:
            self._check_open()
            call.began = time.perf_counter()
            generation = await self._sample(context.ids, self._sampling(call.index, request))
            call.ended = time.perf_counter()
        try:
            call.answer(generation, self.codec, context, request.stop)
        except Exception as error:
            self.stop, self.failure = StopReason.PARSE_ERROR, error
            raise RequestError(500, "no message can be made of what was sampled") from error

    def _sampling(self, index: int, request: Wishes) -> SamplingParams:
        own = self.sampling
        most = own.max_generate_length
        return replace(
            own,
            seed=(own.seed + index) % 2**64,
            max_generate_length=most if request.max_tokens is None else min(most, request.max_tokens),
            stop=tuple(dict.fromkeys([*own.stop, *request.stop])),
        )

    async def _sample(self, ids: list[int], sampling: SamplingParams) -> Generation:
        engine_id = self._take()
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
            self._give(engine_id, keep=generation is not None)
        self._check_open()
        if generation.finish == FinishReason.ABORT:
            self.stop = StopReason.ABORTED
            raise RequestError(503, "sampling was aborted")
        return generation

    def _take(self) -> str:
        """A trajectory of the engine for one call."""
        if self._idle is not None:
            engine_id, self._idle = self._idle, None
            return engine_id
        number = next(i for i in range(len(self._engine_ids) + 1) if self._engine_id(i) not in self._engine_ids)
        engine_id = self._engine_id(number)
        self._engine_ids.add(engine_id)
        self.engine.open(engine_id)
        return engine_id

    def _give(self, engine_id: str, keep: bool) -> None:
        """The call is over; its place in the engine is kept for the next one if no other call is under way."""
        if self.closed:  # it is released already
            return
        if keep and len(self._engine_ids) == 1:
            self._idle = engine_id
        else:
            self._engine_ids.remove(engine_id)
            self.engine.release(engine_id)

    def _engine_id(self, number: int) -> str:
        return f"{self.name}#{number}" if number else self.name

    def _check_open(self) -> None:
        if self.closed:  # the managed service's words, by which its SDK knows that there is nothing more to report
            message = f"trajectory {self.name} is not in valid status: it is over"
            raise RequestError(410, message, "trajectory_over")

    def _check_room(self, calls: int) -> None:
        self._check_open()
        if len(self._calls) + self._under_way + calls > self.limits.max_calls:
            self.stop = StopReason.MAX_TURNS
            message = f"this trajectory may call the model {self.limits.max_calls} times (generator.agent.max_calls)"
            raise RequestError(429, message, "max_calls")

    def _check_length(self, least: float, length: str) -> None:
        """Refuse what cannot fit, for it has at least so many tokens, before it is encoded: others wait for that."""
        if least > self.limits.max_context_length:
            raise self._too_long(length)

    def _check_characters(self, characters: int) -> None:
        self._check_length(characters / CHARACTERS_PER_TOKEN, f"{characters} characters")

    def _check_context(self, context: Context) -> None:
        if len(context.ids) >= self.limits.max_context_length:
            raise self._too_long(f"{len(context.ids)} tokens")
        if not context.ids:
            raise RequestError(400, "prompt has no tokens", param="prompt")

    def _too_long(self, length: str) -> RequestError:
        self.stop = StopReason.CONTEXT_LIMIT
        message = f"this model's maximum context length is {self.limits.max_context_length} tokens, of which the "
        message += f"answer needs one; the request has {length}"
        return RequestError(400, message, "context_length_exceeded", "messages")

    # -- the end ------------------------------------------------------------------------------------------------------

    def pay(self, rewards: float | Sequence[float]) -> None:
        """Reward the trajectory by one value, or each of its calls so far by its own, in the order in which they began.
        The latest report counts.

        Raises:
            RequestError: 400 a value is not finite or too large, or their number is wrong; 410 the trajectory is over.
        """
        self._check_open()
        values = [float(v) for v in ([rewards] if isinstance(rewards, int | float) else rewards)]
        calls = self._in_order()
        if not all(abs(value) < LARGEST_REWARD for value in values):
            raise RequestError(400, f"rewards must be finite numbers below {LARGEST_REWARD:g}", param="rewards")
        if len(values) not in (1, len(calls)):
            message = (
                f"there are {len(values)} rewards for {len(calls)} calls of the model; report one, or one for each"
            )
            raise RequestError(400, message, param="rewards")
        for place, call in enumerate(calls):
            call.reward = values[place] if len(values) > 1 else 0.0
        self.rewards = values
        self.paid.set()

    def finish(self, status: str, error: str | None = None) -> None:
        """The program is done: ready or failed. What it says first stays."""
        if self.status is None:
            self.status, self.error = status, error
        self.finished.set()

    def turns(self) -> list[Turn]:
        """The turns of all calls that were answered, with their rewards: a single one on the last turn."""
        turns = arrange(self._in_order())
        if turns and self.rewards is not None and len(self.rewards) == 1:
            turns[-1].reward = self.rewards[0]
        return turns

    def close(self) -> None:
        """Abort what is sampled and give back the engine's places; later requests are refused."""
        if self.closed:
            return
        self.closed = True
        for engine_id in sorted(self._engine_ids):
            self.engine.release(engine_id)

    def _in_order(self) -> list[Call]:
        return sorted(self._calls, key=lambda call: call.index)
