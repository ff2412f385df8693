"""The engine for servers (vLLM and SGLang), as the trainer uses it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import EngineLostError, EngineStats, Generation, SamplingParams
from mtrl.engines.server.api import ServerBusyError, ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.engines.server.backend import Backend
from mtrl.engines.server.replica import Replica
from mtrl.engines.server.server_group import ServerGroup, make_replicas, pause_mode
from mtrl.engines.server.sync import WeightSync
from mtrl.engines.server.turn import PartialTurn, check_answer
from mtrl.engines.server.update import Weights
from mtrl.errors import UserError
from mtrl.types import FinishReason
from mtrl.utils.http_client import exponential_pause

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.5
"""Pause before the first retry of a turn, in seconds; each further pause is twice as long."""
LONGEST_PAUSE = 30.0
"""Maximum pause before a retry of a turn, in seconds."""
CLOSING = 30.0
"""Timeout for each part of the shutdown after the servers have ended, in seconds."""


class EngineClosedError(RuntimeError):
    """The engine was closed."""


class TurnLostError(ServerError):
    """No server sampled this turn, after all retries."""


def max_in_flight(max_num_seqs: int) -> int:
    """Return the maximum number of turns that are sent to a server which samples `max_num_seqs` at once: a quarter more
    (at least 1), so that the server has the next turn when one ends."""
    return max_num_seqs + max(1, max_num_seqs // 4)


class _PendingTurn:
    """A turn that a caller waits for."""

    def __init__(self, trajectory_id: str, loop: asyncio.AbstractEventLoop):
        self.trajectory_id = trajectory_id
        self.ended: asyncio.Future[Generation] = loop.create_future()
        """Future that is done when the turn was aborted or has failed; its caller then need not wait for a server."""

    def abort(self) -> None:
        if not self.ended.done():
            self.ended.set_result(Generation([], [], FinishReason.ABORT, []))

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # marks it as retrieved: asyncio would warn where no caller waits any more


class ServerEngine:
    """See `mtrl.engines.base.Engine`: turns are sampled by servers, each with the whole model.

    A turn that a server does not answer is requested again, on another server if there is one, and counted once.
    Servers that die or hang are restarted and get the newest weights before they get turns. Turns never use prefix
    caches of older weights: every change of weights drops the caches and uses a new salt.
    """

    def __init__(
        self,
        backend: Backend,
        sync: WeightSync,
        *,
        vocabulary: int,
        context: int,
        max_num_seqs: int,
        in_flight: str,
        log_folder: Path,
        devices: Sequence[int] | None = None,
    ):
        """Start the servers and wait until they are ready, or connect to those at `settings.urls`.

        Args:
            vocabulary: size of the vocabulary; the model's token ids are below it.
            context: maximum number of tokens of a whole conversation.
            max_num_seqs: number of turns that one server samples at once; a quarter more (at least 1) are sent.
            in_flight: `continue` or `drain`; `settings.pause_mode` overrides it.
            log_folder: folder of the servers' log files; output is appended.
            devices: indices of the GPUs of all servers, in order; None: there are no GPUs, or every server uses all.

        Raises:
            UserError: a server does not start; the message contains the error of its log.
        """
        self.backend, self.sync = backend, sync
        self.vocabulary, self.context = vocabulary, context
        replicas = make_replicas(backend, log_folder, devices)
        mode = pause_mode(backend, in_flight)
        self.server_group = ServerGroup(backend, sync, replicas, mode, max_in_flight(max_num_seqs), self._give_up)
        self._name = uuid.uuid4().hex[:12]
        """Random id of this engine in the names of its requests, so that they differ from those of other trainers."""
        self._numbers = itertools.count()
        self._counts: Counter[str] = Counter()
        self._pending: set[_PendingTurn] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks that may outlive their caller."""
        self._renamed: dict[int, int] = {}
        """Policy version by the version number of the servers, where they differ (`version.setter`)."""
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            asyncio.run(self.server_group.start())
        except BaseException:  # such as Ctrl-C, or the end of another rank
            self.server_group.kill()
            raise

    # -- the engine's protocol ---------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version_of(self.server_group.version)

    @version.setter
    def version(self, version: int) -> None:
        """Change the version number of the weights in use."""
        self._renamed[self.server_group.version] = version

    @property
    def stats(self) -> EngineStats:
        """Statistics so far. `extra` has `retries` (requests beyond the first of their turn), `resent` (turns with at
        least one retry), `restarts` (of servers), `sync_seconds` (of all changes of weights), `waiting` (turns in the
        queue) and `replicas` (servers that accept turns).
        """
        counts, server_group = self._counts, self.server_group
        extra = {
            "retries": counts["retries"],
            "resent": counts["resent"],
            "restarts": server_group.restarts,
            "sync_seconds": server_group.sync_seconds,
            "waiting": server_group.router.waiting,
            "replicas": len(server_group.serving),
        }
        numbers = {name: float(number) for name, number in extra.items()}
        return EngineStats(counts["prompt"], counts["cached"], counts["sampled"], numbers)

    def open(self, trajectory_id: str) -> None:
        """Do nothing: the engine plans nothing before the first request."""

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `Engine`.

        Raises:
            UserError: a token id is outside the model's vocabulary, or no server is left.
            ServerRefusedError: the server reports that the request is wrong.
            TurnLostError: no server sampled the turn, after all retries.
        """
        loop = self._attach()
        if len(prompt) >= self.context:
            return Generation([], [], FinishReason.LENGTH, [])
        check_ids(trajectory_id, prompt, self.vocabulary)
        room = min(sampling.max_generate_length, self.context - len(prompt))
        pending = _PendingTurn(trajectory_id, loop)
        self._pending.add(pending)
        sampled = loop.create_task(self._sample(trajectory_id, PartialTurn(prompt, sampling, room)))
        try:
            # A server that hangs must not block the caller of an aborted turn.
            await asyncio.wait((sampled, pending.ended), return_when=asyncio.FIRST_COMPLETED)
            return pending.ended.result() if pending.ended.done() else self._counted(prompt, sampled.result())
        finally:
            self._pending.discard(pending)
            self._end(sampled)

    def release(self, trajectory_id: str) -> None:
        for pending in self._pending:
            if pending.trajectory_id == trajectory_id:
                pending.abort()
        self.server_group.router.release(trajectory_id)

    async def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Engine`; returns when at least one server samples under these weights, and none under others.

        Raises:
            UserError: the weights do not reach the servers, and the servers cannot be restarted.
        """
        loop = self._attach()
        task = loop.create_task(self._load(weights, version))
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        await asyncio.shield(task)  # a cancelled caller must not leave servers paused

    async def sleep(self) -> None:
        """Make the servers free their GPUs' memory after the turns in flight have ended. New turns wait until `wake`
        and new weights.

        Raises:
            UserError: servers are lost and cannot be restarted.
        """
        self._attach()
        await self.server_group.sleep()

    async def wake(self) -> None:
        """Make the servers allocate their GPUs' memory again; `load_weights` must follow.

        Raises:
            UserError: servers are lost and cannot be restarted.
        """
        self._attach()
        await self.server_group.wake()

    async def probe(self, prompt: list[int], sampling: SamplingParams) -> list[Generation]:
        """Return the same short turn, sampled by every server that accepts turns.

        Raises:
            UserError: no server is left, or servers do not answer after all retries.
        """
        self._attach()
        check_ids("the canary", prompt, self.vocabulary)
        retries = RetryPolicy(self.backend.settings)
        while True:
            await self.server_group.until_serving()
            replicas = self.server_group.serving
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

    async def close(self) -> None:
        """End the servers, even in the middle of their work, and abort turns in flight. Servers at given URLs keep
        running."""
        for pending in self._pending:
            pending.abort()
        self._give_up(EngineClosedError("the engine is closed"))
        await self.server_group.close()
        loop = asyncio.get_running_loop()
        if running := [task for task in self._tasks if task.get_loop() is loop]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CLOSING)
        with suppress(Exception):  # the servers may have ended already
            async with asyncio.timeout(CLOSING):
                await self.sync.close()

    # -- one turn ----------------------------------------------------------------------------------------------------

    async def _sample(self, trajectory_id: str, turn: PartialTurn) -> Generation:
        """Sample the turn, with as many requests as it takes."""
        number, retries, avoid = next(self._numbers), RetryPolicy(self.backend.settings), None
        while True:
            try:
                async with self.server_group.router.slot(trajectory_id, number, avoid) as index:
                    avoid = index
                    if (whole := await self._ask(self.server_group.replicas[index], turn)) is not None:
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
        server_group, seconds = self.server_group, self.backend.settings.request_timeout
        updates, versions, mark = server_group.updates, replica.versions, len(replica.versions) - 1
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
        if answer.finish == FinishReason.ABORT and updates == server_group.updates and not turn.can_continue(answer):
            raise ServerError(f"{replica.name} ended a request early, which was not aborted")
        replica.record_turn()
        return turn.add(answer)

    def _counted(self, prompt: list[int], turn: Generation) -> Generation:
        """Add a finished turn to the statistics, once for all its requests, and convert its versions."""
        self._counts.update(prompt=len(prompt), cached=turn.cached_tokens, sampled=len(turn.token_ids))
        spans = [(self._version_of(version), count) for version, count in turn.version_spans]
        return replace(turn, version_spans=spans)

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _version_of(self, served: int) -> int:
        """Convert the servers' version number to the policy version."""
        return self._renamed.get(served, served)

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Use the running event loop from now on, and return it."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._pending.clear()
            self._tasks.clear()
            self.server_group.attach()
        return loop

    async def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        copied = await asyncio.to_thread(Weights.copy, weights, version)
        await self.server_group.load(copied)
        self._renamed.pop(version, None)

    def _give_up(self, error: Exception) -> None:
        """End the use of the engine: all waiting and further requests raise the first such error."""
        self._error = self._error or error
        for pending in self._pending:
            pending.fail(self._error)
        self.server_group.fail(self._error)

    def _end(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task without waiting for its end."""
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        task.cancel()

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
