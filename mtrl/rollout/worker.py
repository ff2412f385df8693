"""A rollout worker: runs the episodes of groups, from row to trajectories, in a process of its own."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mtrl.engines.base import EngineLostError, EngineStats, SamplingParams
from mtrl.errors import UserError
from mtrl.rollout.episode import BaseLoop
from mtrl.rollout.rollouts import Rollouts
from mtrl.types import Row
from mtrl.utils.text import one_line

POLL_SECONDS = 5.0
"""Time after which `results` returns without a finished group, in seconds."""
CLOSING_SECONDS = 20.0
"""Time limit for the episodes in progress to close their environments when the worker is closed, in seconds."""
ERRORS: dict[str, type[Exception]] = {"lost": EngineLostError, "user": UserError, "other": RuntimeError}
"""Class of an error by its kind; only kind and message travel between processes."""


@dataclass(frozen=True)
class GroupRequest:
    """A group whose episodes are to be run."""

    number: int
    """Number of the request; a group that is requested again has another number."""
    group_id: str
    row: Row
    size: int
    """Number of episodes."""
    sampling: SamplingParams


@dataclass(frozen=True)
class Failure:
    """An error: its kind (a key of `ERRORS`) and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return cls("lost" if isinstance(error, EngineLostError) else "user", str(error))
        return cls("other", f"{type(error).__name__}: {one_line(error)}")

    def error(self) -> Exception:
        """Return the error in this process."""
        return ERRORS[self.kind](self.message)


async def failure(action: Awaitable[object]) -> Failure | None:
    """Await an action. Return its error; None if it succeeded."""
    try:
        await action
    except Exception as error:
        return Failure.of(error)
    return None


@dataclass(frozen=True)
class GroupAnswer:
    """The end of a request."""

    serial: int
    """Number of the answer, from 1, in the order of the ends."""
    number: int
    """Number of the request."""
    result: bytes | Failure
    """Pickled trajectories of the group, or the error that ended it."""


@dataclass(frozen=True)
class WorkerReport:
    """The answers that the leader has not received yet, and the totals of the worker's engine."""

    answers: Sequence[GroupAnswer]
    stats: EngineStats


class RolloutWorker:
    """Runs the groups that the leader requests, several at once, with an engine and environments of its own.

    All methods are called by the leader and run on one event loop. They return errors instead of raising them, so that
    an exception at the leader means that the process is lost.
    """

    def __init__(self, make: Callable[[], BaseLoop[Any]], seed: int, prepare: Callable[[], object] = lambda: None):
        """
        Args:
            make: function that makes the loop of the episodes and its engine; it is called in a separate thread.
            seed: seed of the run.
            prepare: function that is called once on the thread of the event loop, before the first episode.
        """
        self._make, self._seed, self._prepare = make, seed, prepare
        self._rollouts: Rollouts
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Groups in progress, by the number of their request."""
        self._answers: list[GroupAnswer] = []
        """Answers that the leader has not confirmed."""
        self._ended = 0
        self._changed = asyncio.Event()

    async def start(self) -> Failure | None:
        """Make the loop and the engine. Return the error if they cannot be made."""
        try:
            loop = await asyncio.to_thread(self._make)
            self._prepare()
        except Exception as error:
            return Failure.of(error)
        self._rollouts = Rollouts(loop, self._seed, max_failed_share=1.0)
        return None

    async def load(self, weights: Any, version: int) -> Failure | None:
        """Use these weights (see `Engine.load_weights`) as policy `version`, and return when no more token is sampled
        under older ones. Return the error if they do not fit."""
        return await failure(self._rollouts.loop.engine.load_weights(weights, version))

    async def adopt(self, view: Any, version: int) -> Failure | None:
        """Use this view of the servers (see `RemoteServerEngine.load_weights`), as `load` uses weights."""
        return await RolloutWorker.load(self, view, version)

    async def hold(self, version: int | None, drains: bool) -> Failure | None:
        """Send no turns to servers until the next `load` (see `RemoteServers.hold`). Return the error if that fails."""
        return await failure(self._rollouts.loop.engine.hold(version, drains))

    async def settle(self) -> Failure | None:
        """Return when no turn is sampled by older adapters (see `RemoteServers.settle`), with the error if that
        fails."""
        return await failure(self._rollouts.loop.engine.settle())

    async def check(self) -> Failure | None:
        """Return the error if the worker can reach no server (see `RemoteServers.check`)."""
        return await failure(self._rollouts.loop.engine.check())

    async def play(self, requests: Sequence[GroupRequest]) -> None:
        """Begin these groups. They begin together: a deterministic engine samples when all open trajectories wait, so
        the composition of its batches must not depend on the arrival of messages."""
        for request in requests:
            self._tasks[request.number] = asyncio.get_running_loop().create_task(self._play(request))

    async def abort(self, numbers: Sequence[int]) -> None:
        """End the groups of these requests without an answer."""
        for number in numbers:
            if number in self._tasks:
                self._tasks[number].cancel()

    async def results(self, received: int) -> WorkerReport:
        """Return the answers after the first `received` ones, as soon as there is one, or nothing after `POLL_SECONDS`.
        Answers are kept until a later call confirms them, so that none is lost with a reply."""
        self._answers = [answer for answer in self._answers if answer.serial > received]
        if not self._answers:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
        return WorkerReport(list(self._answers), self._rollouts.loop.engine.stats)

    async def close(self) -> None:
        """End the groups in progress, close their environments, and end the engine."""
        if tasks := list(self._tasks.values()):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=CLOSING_SECONDS)
        if hasattr(self, "_rollouts"):
            await self._rollouts.loop.close()
            await self._rollouts.loop.engine.close()

    async def _play(self, request: GroupRequest) -> None:
        result: bytes | Failure
        try:
            group = await self._rollouts.group(request.group_id, request.row, request.size, request.sampling)
            result = pickle.dumps(group.trajectories, protocol=5)
        except Exception as error:
            result = Failure.of(error)
        finally:
            del self._tasks[request.number]
        self._ended += 1
        self._answers.append(GroupAnswer(self._ended, request.number, result))
        self._changed.set()
