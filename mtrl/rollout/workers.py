"""Rollout workers as the leader sees them: groups are divided among them, and run again when a worker is lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mtrl.engines.base import EngineLostError, EngineStats, SamplingParams
from mtrl.errors import UserError
from mtrl.rollout.episode import fail
from mtrl.rollout.processes import Cluster, WorkerLostError, WorkerSilentError
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.worker import CLOSING_SECONDS, POLL_SECONDS, Failure, GroupAnswer, GroupRequest, WorkerReport
from mtrl.types import Generation, Group, Row, Trajectory
from mtrl.utils.text import one_line

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of workers that may die while they play a group, before the group counts as failed; and number of consecutive
failed starts of a worker after which the run ends."""
WAITING = "waiting"
"""Name of the only number in the statistics of a worker's engine that is no total since its start: the number of turns
in its queue, which ends with the worker."""
ROOM_SECONDS = 1.0
"""Seconds between two looks for room in the cluster, while a lost worker has none."""


@dataclass(eq=False)
class _Pending:
    """A group that a caller waits for."""

    request: GroupRequest
    trajectories: asyncio.Future[list[Trajectory]]
    deaths: int = 0
    """Number of workers that died while they ran the group."""

    @property
    def is_suspect(self) -> bool:
        """Whether the group may be the cause of the deaths. It is then run alone, so that no other group fails with
        it."""
        return self.deaths >= MAX_DEATHS - 1


@dataclass(eq=False)
class _Worker:
    """A worker, which keeps its place when its process is replaced."""

    index: int
    handle: Any = None
    """Process of the worker; None: it has none, because it waits for room."""
    is_live: bool = False
    """Whether it has started and has the newest weights, so that it gets groups."""
    groups: dict[int, _Pending] = field(default_factory=dict)
    """Groups in progress, by the number of their request."""
    received: int = 0
    """Number of answers that have arrived from this process."""
    stats: EngineStats = field(default_factory=EngineStats)
    supervisor: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return f"rollout worker {self.index}"


class Workers:
    """N workers, each with its own engine. It has the part of `mtrl.engines.base.Engine` that does not sample, since
    new weights go to all of them.

    A group is run by one worker, the one with the fewest groups. All groups that are requested in the same pass of
    the event loop are sent together, so their division depends on their order alone. Each group is returned once: when
    a process is lost, its groups without an answer go to other workers, under a new number, with the same seeds.

    A version counts when every worker has loaded it, or has lost its process. A new process loads the newest weights
    before it gets a group. So no group that is requested after `load_weights` has a token of older weights.
    """

    def __init__(self, cluster: Cluster, count: int, timeout: float):
        """
        Args:
            timeout: time limit in seconds of a start, of loading weights, and of any other answer of a worker.
        """
        self.cluster, self.timeout = cluster, timeout
        self.version = 0
        """Policy version that every worker has loaded."""
        self._workers = [_Worker(index) for index in range(count)]
        self._queue: list[_Pending] = []
        """Groups that no worker runs yet."""
        self._numbers = itertools.count()
        self._newest: tuple[Any, int] | None = None
        """Reference to the newest weights, and their version; None: those that the workers start with."""
        self._load_method = "load"
        """Method of a worker that takes the newest weights and their version."""
        self._are_held = False
        """Whether no worker may begin to play, since the newest weights are about to change."""
        self._restarts = 0
        self._earlier = EngineStats()
        """Statistics of processes that were lost."""
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatching = False

    async def start(self) -> None:
        """Start all workers in parallel.

        Raises:
            UserError: a worker does not start; all processes are then ended.
        """
        try:
            await asyncio.gather(*map(self._begin, self._workers))
        except BaseException as error:
            self.cluster.close()
            if isinstance(error, WorkerLostError):
                raise UserError(f"rollouts.workers={len(self._workers)} cannot start: {error}") from error
            raise

    @property
    def stats(self) -> EngineStats:
        """Sums over all workers. `extra` also has `workers` (those that play groups) and `worker_restarts`."""
        total = self._earlier
        for worker in self._workers:
            total += worker.stats
        live = sum(worker.is_live for worker in self._workers)
        return replace(total, extra={**total.extra, "workers": float(live), "worker_restarts": float(self._restarts)})

    async def group(self, group_id: str, row: Row, size: int, sampling: SamplingParams) -> list[Trajectory]:
        """Return the trajectories of `size` episodes of one row, as `Rollouts.group` runs them. After `MAX_DEATHS`
        lost processes all of them are failures.

        Raises:
            UserError: no worker can be started any more, or the row cannot be sent to one.
        """
        loop = self._attach()
        request = GroupRequest(next(self._numbers), group_id, row, size, sampling)
        pending = _Pending(request, loop.create_future())
        self._enqueue(pending)
        try:
            return await pending.trajectories
        finally:
            self._forget(pending)

    async def load_weights(self, weights: Any, version: int) -> None:
        """Load weights into every worker as policy `version`. It returns when all have confirmed them, except those
        whose processes are being replaced, and at least one runs groups.

        Raises:
            UserError: no worker can be started any more.
            RuntimeError: the weights do not fit.
        """
        self._attach()
        reference = None if weights is None else await asyncio.to_thread(self.cluster.share, weights)
        await self._load_all(reference, version)

    async def _load_all(self, reference: Any, version: int) -> None:
        """See `load_weights`."""
        self._newest, self._are_held = (reference, version), False
        results = await asyncio.gather(*(self._load(worker) for worker in self._workers if worker.is_live))
        if failure := next(filter(None, results), None):
            self._give_up(failure.error())
        while self._error is None and not any(worker.is_live for worker in self._workers):
            await asyncio.sleep(0.05)
        if self._error is not None:
            raise self._error
        self.version = version

    def open(self, trajectory_id: str) -> None:
        """Do nothing: the engine of a worker opens the trajectory."""

    def release(self, trajectory_id: str) -> None:
        """Do nothing: the engine of a worker releases the trajectory."""

    async def generate(self, trajectory_id: str, prompt: Any, sampling: SamplingParams) -> Generation:
        """Raise an error, since only whole groups are sampled (`group`)."""
        raise RuntimeError("rollout workers play whole groups; call group")

    async def close(self) -> None:
        """Close the environments and engines of all workers, then end their processes."""
        running = [worker.supervisor for worker in self._workers if worker.supervisor is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        live = [worker for worker in self._workers if worker.is_live]
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS + POLL_SECONDS):
                calls = (self.cluster.call(worker.handle, "close") for worker in live)
                await asyncio.gather(*calls, return_exceptions=True)
        for worker in live:
            worker.is_live = False
        self._give_up(EngineLostError("the rollout workers are closed"))
        await asyncio.to_thread(self.cluster.close)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Supervise the workers on the running event loop, and return it."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._dispatching = loop, False
            self._queue.clear()
            for worker in self._workers:
                worker.groups.clear()
                worker.supervisor = loop.create_task(self._supervise(worker))
        return loop

    def _enqueue(self, pending: _Pending) -> None:
        self._queue.append(pending)
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """Dispatch after the other tasks of this pass of the event loop have enqueued their groups."""
        if self._queue and not self._dispatching:
            assert self._loop is not None
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Send the waiting groups to workers that may play them."""
        self._dispatching = False
        batches: dict[_Worker, list[_Pending]] = {}
        waiting, self._queue = self._queue, []
        for pending in waiting:
            if (worker := self._worker_for(pending)) is None:
                self._queue.append(pending)
            else:
                worker.groups[pending.request.number] = pending
                batches.setdefault(worker, []).append(pending)
        for worker, batch in batches.items():
            try:
                self.cluster.tell(worker.handle, "play", [pending.request for pending in batch])
            except Exception as error:  # the rows are the user's
                sentence = f"rows cannot be sent to a rollout worker ({one_line(error)}); set rollouts.workers=0"
                for pending in batch:
                    del worker.groups[pending.request.number]
                    _end(pending, UserError(sentence))

    def _worker_for(self, pending: _Pending) -> _Worker | None:
        """Return the live worker with the fewest groups; for a suspect group one without groups. Return None if there
        is none."""
        free = [one for one in self._workers if one.is_live and not any(g.is_suspect for g in one.groups.values())]
        if pending.is_suspect:
            free = [one for one in free if not one.groups]
        return min(free, key=lambda one: (len(one.groups), one.index), default=None)

    def _forget(self, pending: _Pending) -> None:
        """Abort a group whose caller has stopped waiting."""
        if pending in self._queue:
            self._queue.remove(pending)
        for worker in self._workers:
            if worker.groups.pop(pending.request.number, None) is not None:
                self.cluster.tell(worker.handle, "abort", [pending.request.number])
                self._dispatch_soon()

    def _take(self, worker: _Worker, answer: GroupAnswer) -> None:
        """Deliver an answer, unless its group was aborted."""
        worker.received = max(worker.received, answer.serial)
        pending = worker.groups.pop(answer.number, None)
        if pending is None:
            return
        self._dispatch_soon()
        if isinstance(answer.result, Failure):
            _end(pending, answer.result.error())
        elif not pending.trajectories.done():
            pending.trajectories.set_result(placed(pickle.loads(answer.result), self.cluster.place(worker.handle)))

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _supervise(self, worker: _Worker) -> None:
        """Receive the answers of a worker, and replace its process when it is lost."""
        try:
            while True:
                try:
                    if not worker.is_live:
                        raise WorkerLostError("it is not running")
                    report: WorkerReport = await self._call(worker, "results", worker.received)
                except WorkerLostError as error:
                    self._lose(worker, str(error))
                    await self._replace(worker)
                    continue
                worker.stats = report.stats
                for answer in report.answers:
                    self._take(worker, answer)
        except Exception as error:  # waiting callers must get the error
            if not isinstance(error, UserError):
                log.exception("%s is not supervised any more", worker.name)
            self._give_up(error)

    async def _replace(self, worker: _Worker) -> None:
        """Start a new process with the newest weights, and let it play.

        Raises:
            EngineLostError: no process starts.
        """
        failures = 0
        while failures < MAX_DEATHS:
            await self._until_room(worker)
            self._restarts += 1
            try:
                await self._begin(worker)
            except (WorkerLostError, UserError) as error:
                is_silent, reason = isinstance(error, WorkerSilentError), str(error)
                if is_silent and await self._lacks_room():  # Ray noticed the loss of a machine after this start
                    continue
                failures += 1
                log.warning("%s: attempt %d to start again failed: %s", worker.name, failures, reason)
                if is_silent:
                    break
                continue
            self._dispatch_soon()
            return
        raise EngineLostError(
            f"{worker.name} was lost and cannot be started again ({reason}); check Ray, then go on with resume=latest"
        )

    async def _until_room(self, worker: _Worker) -> None:
        """Wait until the cluster has room for one more process. The run goes on meanwhile, if other workers run
        episodes.

        Raises:
            EngineLostError: no worker has run for the time limit.
        """
        clock, is_said = asyncio.get_running_loop().time, False
        last_active = clock()
        while await self._lacks_room():
            if not is_said:
                is_said = True
                log.warning("%s waits, because the cluster has no room for it; other workers go on", worker.name)
            if any(one.is_live for one in self._workers):
                last_active = clock()
            elif clock() - last_active > self.timeout:
                raise EngineLostError(
                    f"all rollout workers are lost, and the cluster had no room for {worker.name} within "
                    f"rollouts.timeout={self.timeout:g} s; start machines again, then go on with resume=latest"
                )
            await asyncio.sleep(ROOM_SECONDS)

    async def _lacks_room(self) -> bool:
        """Whether the cluster has no room for one more process."""
        return await self.cluster.room() <= sum(one.handle is not None for one in self._workers)

    async def _begin(self, worker: _Worker) -> None:
        """Start the process of a worker, and load the newest weights.

        Raises:
            WorkerLostError: the process ends or does not answer.
            UserError: the worker cannot make its task, model or engine.
        """
        worker.handle, worker.received = self.cluster.spawn(worker.index), 0
        try:
            _check(await self._call(worker, "start"))
            loaded = None
            while self._newest is not loaded or self._are_held:
                if self._are_held:
                    await asyncio.sleep(0.05)
                    continue
                loaded = self._newest
                _check(await self._call(worker, self._load_method, *loaded))
        except BaseException:
            self._end_process(worker)
            raise
        worker.is_live = True

    def _end_process(self, worker: _Worker) -> None:
        self.cluster.kill(worker.handle)
        worker.handle = None

    async def _load(self, worker: _Worker) -> Failure | None:
        """Load the newest weights into a live worker. A worker that does not confirm them gets no more groups and is
        replaced; that is no failure."""
        assert self._newest is not None
        if not worker.is_live:  # lost since this task was created; the new process loads the weights at its start
            return None
        handle = worker.handle
        try:
            return await self._call(worker, self._load_method, *self._newest)
        except WorkerLostError as error:
            if worker.handle is handle:  # else the supervisor has replaced it meanwhile
                self._lose(worker, str(error))
            return None

    async def _call(self, worker: _Worker, method: str, *args: Any, more_seconds: float = 0.0) -> Any:
        """Call a method of a worker within the time limit, which is `more_seconds` longer for this call.

        Raises:
            WorkerLostError: the process has ended, or does not answer.
        """
        try:
            async with asyncio.timeout(self.timeout + POLL_SECONDS + more_seconds):
                return await self.cluster.call(worker.handle, method, *args)
        except TimeoutError:
            raise WorkerSilentError(f"no answer within rollouts.timeout={self.timeout:g} s") from None

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Kill the process of a worker, if it still runs, and queue its groups again."""
        if not worker.is_live:
            return
        log.warning("%s is lost (%s); its %d groups are run again", worker.name, reason, len(worker.groups))
        worker.is_live = False
        self._end_process(worker)
        totals = {name: value for name, value in worker.stats.extra.items() if name != WAITING}
        self._earlier, worker.stats = self._earlier + replace(worker.stats, extra=totals), EngineStats()
        lost, worker.groups = list(worker.groups.values()), {}
        for pending in lost:
            pending.deaths += 1
            if pending.deaths < MAX_DEATHS:
                pending.request = replace(pending.request, number=next(self._numbers))
                self._enqueue(pending)
            elif not pending.trajectories.done():
                error = WorkerLostError(f"the worker was lost {MAX_DEATHS} times during this group; the last: {reason}")
                pending.trajectories.set_result(_failures(pending.request, error))

    def _give_up(self, error: Exception) -> None:
        """End the use of the workers: all waiting and further requests raise the first such error."""
        self._error = self._error or error
        for pending in [*self._queue, *(one for worker in self._workers for one in worker.groups.values())]:
            _end(pending, self._error)


@dataclass
class WorkerRollouts(Rollouts):
    """Rollouts whose groups are run by workers. `loop` of this process runs none; its clock `sampling` counts the
    time in which at least one group was in progress."""

    workers: Workers = field(kw_only=True)

    async def group(self, group_id: str, row: Row, size: int, sampling: SamplingParams) -> Group:
        """See `Rollouts.group`."""
        with self.loop.sampling_clock:
            trajectories = await self.workers.group(group_id, row, size, sampling)
        for trajectory in trajectories:
            self.on_episode(trajectory)
        return Group(group_id, row, trajectories)


def _check(failure: Failure | None) -> None:
    if failure is not None:
        raise failure.error() if failure.kind != "other" else WorkerLostError(failure.message)


def _end(pending: _Pending, error: Exception) -> None:
    if not pending.trajectories.done():
        pending.trajectories.set_exception(error)
        pending.trajectories.exception()  # marks it as retrieved: asyncio would warn where no caller waits any more


def _failures(request: GroupRequest, error: Exception) -> list[Trajectory]:
    """Return the trajectories of a group of which no episode was run."""
    trajectories = [Trajectory(str(request.row["id"]), request.group_id, index) for index in range(request.size)]
    for trajectory in trajectories:
        fail(trajectory, error)
        trajectory.metrics["attempts"] = MAX_DEATHS
    return trajectories


def placed(trajectories: list[Trajectory], place: str) -> list[Trajectory]:
    """Name the machine in the errors of failed trajectories: its files or its services may be the reason."""
    for trajectory in trajectories if place else ():
        if trajectory.error:
            trajectory.error = f"{place}: {trajectory.error}"
    return trajectories
