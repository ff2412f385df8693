"""Updates of the servers' weights: pause, send the weights, drop the caches of older weights, check, resume."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mtrl.engines.server.adapters import ServedAdapter
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.lora_sync import adapter_name
from mtrl.engines.server.replica import Replica
from mtrl.engines.server.server_api import ServerApi, ServerError
from mtrl.engines.server.sync import SyncError, Weights, WeightSync

SEND_TIMEOUT_FACTOR = 10
"""Timeout for sending weights, as a multiple of `sync_timeout`."""
DRAINING = ("drain", "wait")
"""Pause modes that wait until all running turns have ended."""
STALE = ("in_place",)
"""Pause modes in which running turns keep their old keys and values, so that the cache cannot be dropped."""


@dataclass
class ServerUpdate:
    """One update of the weights of some servers. The caller must ensure that no new turn is sent during the update."""

    backend: ServerBackend
    sync: WeightSync
    mode: str
    """Pause mode, one of the server's."""
    replicas: list[Replica]
    weights: Weights
    failed: dict[Replica, str] = field(default_factory=dict)
    """Replicas that did not load the weights, with the reason in the server's message; they may still be paused."""

    async def run(self) -> None:
        """Run the update.

        Raises:
            UserError: the weights cannot be sent to any server, for example because the disk is full.
        """
        settings = self.backend.settings
        pausing = settings.sync_timeout + (settings.request_timeout if self.mode in DRAINING else 0)
        try:
            await self._each("a pause", lambda server: server.pause(self.mode), self.replicas, pausing)
            await self._send(self._remaining())
            if wrong := await self._wrong_versions():
                await self._send(list(wrong))
                for replica, version in (await self._wrong_versions()).items():
                    self.failed[replica] = f"reports weights of version {version} instead of {self.weights.version}"
            for replica in self._remaining():
                self._record(replica)
        finally:
            await self._each("resuming after a pause", lambda server: server.resume(), self._remaining())

    def _remaining(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica not in self.failed]

    async def _send(self, replicas: Sequence[Replica]) -> None:
        """Send the weights, and drop the caches of older weights."""
        await self._load(replicas)
        if self.mode not in STALE:
            sent = [replica for replica in replicas if replica not in self.failed]
            await self._each("dropping its cache", lambda server: server.drop_cache(), sent)

    async def _load(self, replicas: Sequence[Replica]) -> None:
        by_url = {replica.api.url: replica for replica in replicas}
        if not by_url:
            return
        seconds = SEND_TIMEOUT_FACTOR * self.backend.settings.sync_timeout
        failed: Mapping[str, str] = {}
        try:
            async with asyncio.timeout(seconds):
                servers = [replica.api for replica in replicas]
                await self.sync.send(servers, self.weights.tensors, self.weights.version)
        except SyncError as error:
            failed = error.failed
        except TimeoutError:
            failed = dict.fromkeys(by_url, f"the update took more than {seconds:g} s")
        self.failed |= {by_url[url]: f"failed in loading weights: {reason}" for url, reason in failed.items()}

    def _record(self, replica: Replica) -> None:
        replica.weights = self.weights
        replica.versions.append(self.weights.version)

    async def _wrong_versions(self) -> dict[Replica, int]:
        """Return the replicas that report another version than that of the update, with that version."""
        found: dict[str, int] = {}

        async def look(server: ServerApi) -> None:
            found[server.url] = await server.version()

        await self._each("reporting its version", look, self._remaining())
        versions = {replica: found[replica.api.url] for replica in self._remaining()}
        return {replica: version for replica, version in versions.items() if version != self.weights.version}

    async def _each(
        self,
        name: str,
        step: Callable[[ServerApi], Awaitable[None]],
        replicas: list[Replica],
        seconds: float | None = None,
    ) -> None:
        self.failed |= await failures(replicas, name, step, seconds or self.backend.settings.sync_timeout)


@dataclass
class AdapterUpdate(ServerUpdate):
    """One update of the adapters of some servers. It needs no pause and drops no cache: each adapter has its own keys
    and values, and turns in flight continue with their adapter."""

    async def run(self) -> None:
        adapter = ServedAdapter(adapter_name(self.weights.version), self.weights.version)
        old = [replica for replica in self.replicas if replica.adapters.newest == adapter]
        # Servers refuse an adapter under the name of one that is loaded.
        await self._each("dropping an adapter", lambda server: server.drop_adapter(adapter.name), old)
        await self._load(self._remaining())
        for replica in self._remaining():
            replica.adapters.add(adapter, replica.api)
            self._record(replica)


async def failures(
    replicas: Sequence[Replica], name: str, step: Callable[[ServerApi], Awaitable[None]], seconds: float
) -> dict[Replica, str]:
    """Take a step on all replicas in parallel, with a timeout of `seconds`; return the replicas that failed, with the
    reason."""

    async def take(replica: Replica) -> str | None:
        try:
            async with asyncio.timeout(seconds):
                await step(replica.api)
        except TimeoutError:
            return f"failed in {name}: no answer within {seconds:g} s"
        except ServerError as error:
            return f"failed in {name}: {error}"
        return None

    problems = await asyncio.gather(*map(take, replicas))
    return {replica: problem for replica, problem in zip(replicas, problems, strict=True) if problem is not None}
