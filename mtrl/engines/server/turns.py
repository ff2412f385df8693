"""Turns that servers sample: each is routed to a server, requested again if that fails, checked, and counted once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import EngineLostError, EngineStats, SamplingParams
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.replica import Replica
from mtrl.engines.server.router import Router
from mtrl.engines.server.server_api import ServerBusyError, ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.engines.server.turn import PartialTurn, check_answer
from mtrl.errors import UserError
from mtrl.types import FinishReason, Generation
from mtrl.utils.http_client import exponential_pause

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Pause before the first retry of a turn, in seconds; each further pause is twice as long."""
LONGEST_PAUSE = 30.0
"""Maximum pause before a retry of a turn, in seconds."""


class TurnLostError(ServerError):
    """No server sampled this turn, after all retries."""


class Servers(Protocol):
    """The servers that turns are sent to."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All servers, also those that accept no turns now."""

    @property
    def router(self) -> Router:
        """The router of the turns; its indices are those of `replicas`."""

    @property
    def updates(self) -> int:
        """Number of changes of weights so far. No turn is sent during a change."""

    async def until_serving(self) -> None:
        """Wait until at least one server accepts turns.

        Raises:
            UserError: no server will.
        """


class _PendingTurn:
    """A turn that a caller waits for."""

    def __init__(self, trajectory_id: str, sampled: asyncio.Task[Generation]):
        self.trajectory_id, self.sampled = trajectory_id, sampled
        self.ended: asyncio.Future[Generation] = sampled.get_loop().create_future()
        """Future that is done when the turn was aborted or has failed; its caller then need not wait for a server."""

    def abort(self) -> None:
        self.sampled.cancel()  # else a retry would take a slot before the caller sees the end
        if not self.ended.done():
            self.ended.set_result(Generation([], [], FinishReason.ABORT, []))

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved: asyncio would warn where no caller waits any more


class ServedTurns:
    """The turns of one process that servers sample.

    A turn that a server does not answer is requested again, on another server if there is one, and counted once.
    """

    def __init__(self, backend: ServerBackend, servers: Servers, *, vocabulary: int, context: int):
        """
        Args:
            vocabulary: size of the vocabulary; the model's token ids are below it.
            context: maximum number of tokens of a whole conversation.
        """
        self.backend, self.servers = backend, servers
        self.vocabulary, self.context = vocabulary, context
        self.renamed: dict[int, int] = {}
        """Policy version by the version number of the servers, where they differ."""
        self._name = uuid.uuid4().hex[:12]
        """Random id in the names of the requests, so that they differ from those of other processes and trainers."""
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._pending: set[_PendingTurn] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks that may outlive their caller."""

    @property
    def stats(self) -> EngineStats:
        """Statistics so far. `extra` has `retries` (requests beyond the first of their turn), `resent` (turns with at
        least one retry) and `waiting` (turns in the queue)."""
        counts = self._counts
        extra = {"retries": counts["retries"], "resent": counts["resent"], "waiting": self.servers.router.waiting}
        numbers = {name: float(number) for name, number in extra.items()}
        return EngineStats(counts["prompt"], counts["cached"], counts["sampled"], numbers)

    def restart(self) -> None:
        """Discard the turns of the last event loop."""
        self._pending.clear()
        self._tasks.clear()

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `Engine`.

        Raises:
            UserError: a token id is outside the model's vocabulary, or no server is left.
            ServerRefusedError: the server reports that the request is wrong.
            TurnLostError: no server sampled the turn, after all retries.
        """
        if len(prompt) >= self.context:
            return Generation([], [], FinishReason.LENGTH, [])
        check_ids(trajectory_id, prompt, self.vocabulary)
        room = min(sampling.max_generate_length, self.context - len(prompt))
        sampling_turn = self._sample(trajectory_id, PartialTurn(prompt, sampling, room))
        sampled = asyncio.get_running_loop().create_task(sampling_turn)
        pending = _PendingTurn(trajectory_id, sampled)
        self._pending.add(pending)
        try:
            # A server that hangs must not block the caller of an aborted turn.
            await asyncio.wait((sampled, pending.ended), return_when=asyncio.FIRST_COMPLETED)
            return pending.ended.result() if pending.ended.done() else self._counted(prompt, sampled.result())
        finally:
            self._pending.discard(pending)
            self.outlive(sampled)
            sampled.cancel()

    def release(self, trajectory_id: str) -> None:
        """See `Engine`."""
        for pending in self._pending:
            if pending.trajectory_id == trajectory_id:
                pending.abort()
        self.servers.router.release(trajectory_id)

    async def probe(self, prompt: list[int], sampling: SamplingParams) -> list[Generation]:
        """Return the same short turn, sampled by every server that accepts turns.

        Raises:
            UserError: no server is left, or servers do not answer after all retries.
        """
        check_ids("the canary", prompt, self.vocabulary)
        retries = RetryPolicy(self.backend.settings)
        while True:
            await self.servers.until_serving()
            replicas = [self.servers.replicas[i] for i in self.servers.router.serving]
            turns = [PartialTurn(prompt, sampling, sampling.max_generate_length) for _ in replicas]
            answers = await asyncio.gather(*map(self._ask, replicas, turns), return_exceptions=True)
            found = [answer for answer in answers if isinstance(answer, Generation)]
            if len(found) == len(replicas):  # the next try leaves out servers that were lost meanwhile
                return found
            error = next(
                (answer for answer in answers if isinstance(answer, BaseException)),
                ServerError("the request was ended early"),
            )
            if not isinstance(error, ServerError):
                raise error
            if (pause := retries.pause_after(error)) is None:
                raise EngineLostError(f"after new weights {retries.description(self.backend.name)}: {error}")
            await asyncio.sleep(pause)

    def abort(self) -> None:
        """Abort all turns in flight."""
        for pending in self._pending:
            pending.abort()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the callers of all turns in flight."""
        for pending in self._pending:
            pending.fail(error)

    def outlive(self, task: asyncio.Task[Any]) -> None:
        """Keep a task that may outlive its caller, until it ends or `close`."""
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)

    async def close(self, seconds: float) -> None:
        """Cancel the tasks that have outlived their callers, and wait for their ends for at most `seconds`."""
        loop = asyncio.get_running_loop()
        if running := [task for task in self._tasks if task.get_loop() is loop]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=seconds)

    def version_of(self, served: int) -> int:
        """Convert the servers' version number to the policy version."""
        return self.renamed.get(served, served)

    # -- one turn ----------------------------------------------------------------------------------------------------

    async def _sample(self, trajectory_id: str, turn: PartialTurn) -> Generation:
        """Sample the turn, with as many requests as it takes."""
        number, retries, avoid = next(self._numbers), RetryPolicy(self.backend.settings), None
        while True:
            try:
                async with self.servers.router.slot(trajectory_id, number, avoid) as index:
                    avoid = index
                    if (whole := await self._ask(self.servers.replicas[index], turn)) is not None:
                        return whole
                avoid = None  # the turn was only interrupted, and its conversation is cached on this server
            except ServerError as error:
                if isinstance(error, ServerRefusedError):
                    raise
                if (pause := retries.pause_after(error)) is None:
                    raise TurnLostError(
                        f"{trajectory_id}: {retries.description(self.backend.name)}: {error}"
                    ) from error
                log.info("%s is requested again: %s", trajectory_id, error)
                self._counts["retries"] += 1
                self._counts["resent"] += retries.repeats == 1
                await asyncio.sleep(pause)

    async def _ask(self, replica: Replica, turn: PartialTurn) -> Generation | None:
        """Request the missing tokens of the turn from this server; return the whole turn if it has ended, else None.

        Raises:
            ServerError: the server gives no answer, or an unusable one.
        """
        servers, seconds = self.servers, self.backend.settings.request_timeout
        updates, versions, mark = servers.updates, replica.versions, len(replica.versions) - 1
        name, salt = f"{self._name}-{next(self._numbers)}", f"{self._name}-{updates}"
        try:
            async with asyncio.timeout(seconds):
                with replica.adapters.sampling(replica.api) as adapter:
                    request = turn.request(name, salt, adapter.name if adapter else None)
                    answer = await replica.api.generate(request)
        except (ServerBusyError, ServerRefusedError):
            raise
        except (ServerError, TimeoutError) as error:
            if replica.versions is versions:  # otherwise the server was restarted meanwhile
                replica.suspect()
            if isinstance(error, ServerError):
                raise
            raise ServerUnreachableError(f"{replica.name}: no answer within {seconds:g} s") from None
        check_answer(answer, request, self.vocabulary)
        if adapter is not None:  # the server reports the version of the base model
            answer = replace(answer, version_spans=[(adapter.version, len(answer.token_ids))])
        if unexpected := {version for version, _ in answer.version_spans}.difference(versions[mark:]):
            problem = f"sampled with weights of version {unexpected.pop()} instead of {versions[-1]}"
            if replica.versions is versions:
                replica.give_up(problem)
            raise ServerError(f"{replica.name} {problem}")
        if answer.finish == FinishReason.ABORT and updates == servers.updates and not turn.can_continue(answer):
            raise ServerError(f"{replica.name} ended a request early, which was not aborted")
        replica.record_turn()
        return turn.add(answer)

    def _counted(self, prompt: list[int], turn: Generation) -> Generation:
        """Add a finished turn to the statistics, once for all its requests, and convert its versions."""
        self._counts.update(prompt=len(prompt), cached=turn.cached_tokens, sampled=len(turn.token_ids))
        spans = [(self.version_of(version), count) for version, count in turn.version_spans]
        return replace(turn, version_spans=spans)

    def _discard_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; its caller has received it already


class RetryPolicy:
    """The retries of one turn and the pauses between them.

    Answers of overloaded servers are retried without counting
    against `retries`, until the pauses reach `request_timeout`; all other errors count."""

    def __init__(self, settings: ServerConfig):
        self.settings = settings
        self.repeats = 0
        self._failures, self._busy, self._waited = 0, 0, 0.0

    def pause_after(self, error: ServerError) -> float | None:
        """Return the pause before the next retry, in seconds; None if no retry is left."""
        self.repeats += 1
        if isinstance(error, ServerBusyError) and self._waited < self.settings.request_timeout:
            pause = exponential_pause(self._busy, FIRST_PAUSE, LONGEST_PAUSE)
            self._busy += 1
            self._waited += pause
            return pause
        self._failures += 1
        if self._failures > self.settings.retries:
            return None
        # After no answer the router makes the turn wait for a server that answers, so no pause is needed.
        if isinstance(error, ServerUnreachableError):
            return 0.0
        return exponential_pause(self._failures - 1, FIRST_PAUSE, LONGEST_PAUSE)

    def description(self, name: str) -> str:
        return (
            f"no server sampled this turn in {self.repeats} attempts (generator.{name}.retries="
            f"{self.settings.retries}); the last error"
        )


def check_ids(trajectory_id: str, prompt: Sequence[int], vocabulary: int) -> None:
    """Check the token ids of a prompt before it is sent, because invalid ids crash some servers.

    Raises:
        UserError: a token id is outside the model's vocabulary.
    """
    wrong = ((i, token) for i, token in enumerate(prompt) if not 0 <= token < vocabulary)
    position, token = next(wrong, (0, None))
    if token is None:
        return
    raise UserError(
        f"the prompt of {trajectory_id} has the token id {token} at position {position}, and the model's largest id is "
        f"{vocabulary - 1}; use the model's own tokenizer, or resize the model for the added tokens"
    )
