"""The engine of a rollout worker whose turns are sampled by servers that the leader controls."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from mtrl.engines.base import EngineLostError, EngineStats, SamplingParams
from mtrl.engines.server.adapters import Adapters
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.replica import Replica
from mtrl.engines.server.router import Router
from mtrl.engines.server.turns import ServedTurns
from mtrl.engines.server.view import ReplicaView, ServersView
from mtrl.errors import UserError
from mtrl.types import Generation

log = logging.getLogger(__name__)

CLOSING = 10.0
"""Timeout for the end of requests in flight when the engine is closed, in seconds."""


class RemoteReplica(Replica):
    """A server that the leader has started and restarts. This process sends it turns, and no turns while it does not
    answer health checks of this process."""

    is_restartable = False
    advice = "the leader restarts it"

    def __init__(self, backend: ServerBackend, view: ReplicaView):
        super().__init__(backend, view.name)
        self._view = view
        self._begin(view)

    async def adopt(self, view: ReplicaView) -> None:
        """Use this newer view."""
        if (view.url, view.token) != (self._view.url, self._view.token):  # it was restarted
            await self.end()
            self._begin(view)
        elif view.versions[-1:] != tuple(self.versions[-1:]):  # turns in flight refer to the list
            self.versions += view.versions[-1:]
        self._view, self.adapters.newest = view, view.adapter
        self.check(True)

    def check(self, answered: bool) -> None:
        """Accept turns or not, after a health check."""
        self.load.serving = answered and self._view.is_current and self.failure is None

    def kill(self) -> None:
        """Do nothing: the server belongs to the leader."""

    def _begin(self, view: ReplicaView) -> None:
        self.api, self.adapters = self.backend.make_api(view.url, view.token), Adapters()
        self.adapters.newest = view.adapter  # only the leader loads and drops adapters
        self.failure, self.versions, self.load.serving = None, list(view.versions), view.is_current
        self.attach()

    async def _start(self) -> None:
        raise NotImplementedError("only the leader starts servers")

    def _exit_description(self) -> str:
        return "has ended"

    def _last_error(self) -> str:
        return ""


class RemoteServers:
    """The servers of the newest view (see `mtrl.engines.server.turns.Servers`)."""

    def __init__(self, backend: ServerBackend, limit: int):
        """
        Args:
            limit: maximum number of turns of this process in flight per server.
        """
        self.backend, self.replicas, self.updates = backend, list[RemoteReplica](), 0
        self.router = Router([], limit)
        self.is_held = False
        """Whether no turn is sent, since weights may change."""
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def adopt(self, view: ServersView) -> None:
        """Use this newer view, and send turns again."""
        if not self.replicas:
            self._connect(view)
        for replica, new in zip(self.replicas, view.replicas, strict=True):
            await replica.adopt(new)
        if self.is_held:
            self.is_held = False
            self.router.resume()
        self._changed.set()
        self.router.dispatch()

    async def check(self) -> None:
        """Check at the start of a run that this process can reach a server.

        Raises:
            UserError: it cannot.
        """
        if any(await asyncio.gather(*(replica.is_reachable() for replica in self.replicas))):
            return
        urls = ", ".join(replica.api.url for replica in self.replicas)
        raise UserError(
            f"a rollout worker cannot reach {urls}; only processes on the machine of rank 0 can reach servers that "
            f"mtrl starts, so start servers yourself and name them by generator.{self.backend.name}.urls, or write "
            "rollouts.workers=0"
        )

    async def hold(self, version: int | None, drains: bool, seconds: float) -> None:
        """Send no turns until the next view.

        Args:
            version: policy version that the servers will load; None if it is not known yet. Tokens of turns in flight
                may already have it.
            drains: whether to wait until no turn is in flight, for at most `seconds`.
        """
        if not self.is_held:
            self.is_held = True
            self.router.pause()
            await asyncio.sleep(0)  # turns that have a slot already send their requests with the older salt
            self.updates += 1
        for replica in self.replicas if version is not None else ():
            replica.versions.append(version)
        if drains:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.router.idle()

    async def settle(self) -> None:
        """Return when every turn in flight that another adapter than that of the present view samples has ended."""
        await asyncio.gather(*(replica.adapters.settle() for replica in self.replicas))

    async def until_serving(self) -> None:
        """See `mtrl.engines.server.turns.Servers`."""
        while not self.router.serving:
            if self.router.error is not None:
                raise self.router.error
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, *(replica.end() for replica in self.replicas), return_exceptions=True)

    def _connect(self, view: ServersView) -> None:
        self.replicas += [RemoteReplica(self.backend, replica) for replica in view.replicas]
        self.router.loads = [replica.load for replica in self.replicas]
        self._watchers = [asyncio.get_running_loop().create_task(self._watch(replica)) for replica in self.replicas]

    async def _watch(self, replica: RemoteReplica) -> None:
        """Check a server's health from this process, since the leader may reach it while this process does not."""

        def on_answer(answered: bool) -> None:
            replica.check(answered)
            if replica.load.serving:
                self._changed.set()
                self.router.dispatch()

        while True:
            reason = await replica.until_lost(on_answer)
            if replica.failure is not None:
                self.router.fail(EngineLostError(f"{reason}; continue with resume=latest"))
                return
            log.warning("%s %s from this rollout worker", replica.name, reason)


class RemoteServerEngine:
    """See `mtrl.engines.base.Engine`. The leader updates the weights of the servers; between `hold` and `load_weights`
    this engine sends no turns."""

    def __init__(self, backend: ServerBackend, *, vocabulary: int, context: int, limit: int):
        """
        Args:
            vocabulary: size of the vocabulary; the model's token ids are below it.
            context: maximum number of tokens of a whole conversation.
            limit: maximum number of turns of this process in flight per server.
        """
        self.servers = RemoteServers(backend, limit)
        self.turns = ServedTurns(backend, self.servers, vocabulary=vocabulary, context=context)
        self.version = 0

    @property
    def stats(self) -> EngineStats:
        """See `ServedTurns.stats`."""
        return self.turns.stats

    async def check(self) -> None:
        """See `RemoteServers.check`."""
        await self.servers.check()

    async def hold(self, version: int | None, drains: bool) -> None:
        """See `RemoteServers.hold`."""
        settings = self.servers.backend.settings
        await self.servers.hold(version, drains, settings.request_timeout + settings.sync_timeout)

    async def settle(self) -> None:
        """See `RemoteServers.settle`."""
        await self.servers.settle()

    async def load_weights(self, view: ServersView, version: int) -> None:
        """Use this view of the servers, whose newest weights are policy `version`, and send turns again."""
        self.turns.renamed = dict(view.renamed)
        await self.servers.adopt(view)
        self.version = version

    def open(self, trajectory_id: str) -> None:
        """Do nothing: the engine plans nothing before the first request."""

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `ServedTurns.generate`."""
        return await self.turns.generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        self.turns.release(trajectory_id)

    async def close(self) -> None:
        """Abort turns in flight, and close the connections. The servers keep running."""
        self.turns.abort()
        self.servers.router.fail(EngineLostError("the engine is closed"))
        await self.turns.close(CLOSING)
        await self.servers.close()
