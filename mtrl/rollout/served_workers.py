"""Rollout workers whose turns are sampled by servers, which the leader controls and to which the workers send turns."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.server.engine import ServerEngine
from mtrl.rollout.processes import Cluster, WorkerLostError
from mtrl.rollout.worker import Failure
from mtrl.rollout.workers import Workers
from mtrl.types import Generation


class ServedWorkers(Workers):
    """See `Workers`. New weights go to the servers, once, and the workers get a view of them.

    An update has three parts: every worker stops to send turns, the servers load the weights, every worker gets the new
    view and goes on. A worker that is lost meanwhile is replaced by one that begins with the new view. So no turn is
    sent during an update, and the version counts when every worker has the view of it. An adapter of an older view
    stays loaded until no turn of a worker is sampled by it.
    """

    def __init__(self, cluster: Cluster, count: int, timeout: float, servers: ServerEngine):
        super().__init__(cluster, count, timeout)
        self.servers, self._load_method = servers, "adopt"
        self.version, self._newest = servers.version, (servers.view(), servers.version)
        self._updating: asyncio.Lock
        self._tasks: set[asyncio.Task[None]] = set()
        self._adapters = ExitStack()
        """Keeps the adapters of the newest view loaded."""
        servers.on_failure = self._give_up
        servers.server_group.on_restart = self._push_soon

    async def start(self) -> None:
        """See `Workers.start`. Each worker must reach a server, too."""
        await super().start()
        try:
            for failure in await asyncio.gather(*(self._call(worker, "check") for worker in self._workers)):
                if failure is not None:
                    raise failure.error()
        except BaseException:
            self.cluster.close()
            raise

    @property
    def stats(self) -> EngineStats:
        """Sums over the workers and the leader's own requests; `extra` has the keys of `Workers.stats` and of
        `ServerEngine.stats`."""
        return super().stats + self.servers.stats

    async def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load weights into the servers as policy `version`. It returns when at least one server samples under them,
        and all workers have confirmed the new view, except those whose processes are being replaced.

        Raises:
            UserError: the weights do not reach the servers, or no worker or server can be started any more.
        """
        await asyncio.shield(self._begin_task(self._update(weights, version)))  # held workers must go on

    async def probe(self, prompt: list[int], sampling: SamplingParams) -> list[Generation]:
        """See `ServerEngine.probe`."""
        return await self.servers.probe(prompt, sampling)

    async def sleep(self) -> None:
        """See `ServerEngine.sleep`."""
        self._attach()
        async with self._updating:
            await self._hold(None, drains=True)
            await self.servers.sleep()

    async def wake(self) -> None:
        """See `ServerEngine.wake`."""
        await self.servers.wake()

    async def close(self) -> None:
        """Close the workers, then the servers."""
        try:
            await super().close()
        finally:
            await self.servers.close()

    def _attach(self) -> asyncio.AbstractEventLoop:
        before = self._loop
        loop = super()._attach()
        if loop is not before:
            self._updating = asyncio.Lock()
            self.servers.attach()  # which supervises the servers, also while the leader sends them nothing
        return loop

    async def _update(self, weights: Mapping[str, Tensor], version: int) -> None:
        async with self._updating:
            await self._hold(version, self.servers.drains)
            await self.servers.load_weights(weights, version)
            await self._publish(version)

    async def _publish(self, version: int) -> None:
        """Send the newest view to all workers."""
        older, self._adapters = self._adapters, self.servers.server_group.keep_adapters()
        await self._load_all(self.servers.view(), version)
        self._begin_task(self._release(older))

    async def _release(self, adapters: ExitStack) -> None:
        """Let the servers drop adapters of an older view, when no turn of a worker is sampled by them. The turns of a
        worker that is lost meanwhile end with it."""
        seconds = self.servers.backend.settings.request_timeout

        async def settle(worker: Any) -> None:
            with suppress(WorkerLostError):
                await self._call(worker, "settle", more_seconds=seconds)

        await asyncio.gather(*(settle(worker) for worker in self._workers if worker.is_live))
        adapters.close()

    def _begin_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin work that may outlive its caller."""
        task = self._attach().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; its caller has received it already

    async def _hold(self, version: int | None, drains: bool) -> None:
        """Let every worker stop to send turns. A worker that does not confirm is replaced."""
        self._are_held = True
        live, settings = [worker for worker in self._workers if worker.is_live], self.servers.backend.settings
        draining = settings.request_timeout + settings.sync_timeout if drains else 0.0

        async def hold(worker: Any) -> Failure | None:
            handle = worker.handle
            try:
                return await self._call(worker, "hold", version, drains, more_seconds=draining)
            except WorkerLostError as error:
                if worker.handle is handle:  # else the supervisor has replaced it meanwhile
                    self._lose(worker, str(error))
                return None

        failures = await asyncio.gather(*map(hold, live))
        if failure := next(filter(None, failures), None):
            self._give_up(failure.error())
            raise failure.error()

    def _push_soon(self) -> None:
        """Send the workers the address of a restarted server."""
        if self._error is None:
            self._begin_task(self._push())

    async def _push(self) -> None:
        async with self._updating:
            if self._error is None and not self._are_held:
                await self._publish(self.version)
