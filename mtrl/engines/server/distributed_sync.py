"""Weight sync by broadcast from the trainer to all servers at once: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from mtrl.config.derived import WEIGHT_BUCKET
from mtrl.config.engine_schema import ServerConfig
from mtrl.distributed import broadcast
from mtrl.engines.server.export import WeightExport
from mtrl.engines.server.sent_weights import SentWeights
from mtrl.engines.server.server_api import Rendezvous, ServerApi
from mtrl.engines.server.sync import GRACE, UpdateSteps, Weights, engine_key, limited, listed
from mtrl.engines.server.weight_parts import WeightPart, changed_parts, whole_parts
from mtrl.errors import UserError
from mtrl.utils.serving import is_loopback
from mtrl.utils.text import one_line

log = logging.getLogger(__name__)

LEAVE_TIMEOUT = 10.0
"""Timeout of leaving a group, in seconds; a server that does not leave in time is ignored."""
CONNECT_SECONDS = 2.0
"""Seconds for which the store of a failed group stays open, so that all servers can connect. A server that finds it
closed would retry until its own timeout, which is half an hour in SGLang."""
LOOPBACK = "127.0.0.1"

Parts = Callable[[], Iterator[WeightPart]]
"""Function that returns the parts of the weights, which are converted as they are taken."""


@dataclass
class SyncGroup:
    """A process group of the trainer and some servers, in which weights are broadcast."""

    name: str
    servers: list[ServerApi]
    store: Any
    """Store through which the members join; when it is closed, waiting members get an error."""
    group: broadcast.GroupMembership | None = None


class DistributedSync:
    """See `WeightSync`. All servers are in one group. A new group is formed when the servers change.

    A member that dies or hangs during a broadcast ends the broadcast for all members, after the timeout at the latest.
    Each failed server that still answers then receives the weights in a group of its own, so that only the faulty
    servers fail.

    With `sync_delta` servers keep the weights, and receive the changes from the last ones if all of them keep those;
    else, and after a failure, they receive whole weights.
    """

    def __init__(self, settings: ServerConfig, export: WeightExport, bucket: int = WEIGHT_BUCKET):
        """
        Raises:
            UserError: trainer and servers share GPUs, which NCCL does not support.
        """
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        if settings.colocate and self._backend == "nccl":
            raise UserError(
                f"{engine_key(settings)}.weight_sync=distributed cannot reach servers on the trainer's own GPUs, which "
                f"NCCL refuses; with {engine_key(settings)}.colocate use weight_sync=tensor or disk"
            )
        self._seconds, self._workers = settings.sync_timeout, settings.tensor_parallel_size
        self._export, self._bucket = export, bucket
        self._group: SyncGroup | None = None
        self._sent = SentWeights() if settings.sync_delta else None
        self.sent_bytes = 0

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Do nothing: tensors are converted as they are sent."""

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        whole = partial(self._parts, weights, None)
        await asyncio.to_thread(whole)  # weights that do not fit are refused before any server is asked
        self.sent_bytes = 0
        base = await self._common_base(servers)
        failed = await self._update_together(list(servers), partial(self._parts, weights, base), version)
        if failed:
            if base is not None:
                log.warning(
                    "servers did not load the changes of version %d and get whole weights; %s", version, listed(failed)
                )
            await self._leave_current()
            retried = [server for server in servers if server.url in failed]
            await asyncio.gather(*(self._update_alone(server, whole, version, failed) for server in retried))
        if self._sent is not None:
            self._sent.record([server for server in servers if server.url not in failed], weights, version)
        final = UpdateSteps(servers)
        final.drop(failed)
        final.check()

    async def close(self) -> None:
        await self._leave_current()

    # -- whole weights or changes ------------------------------------------------------------------------------------

    def _parts(self, weights: Mapping[str, Tensor], base: Weights | None) -> Iterator[WeightPart]:
        """Return the parts of these weights.

        Args:
            base: the weights that all receivers keep; None: they keep others, or none.
        """
        exported = self._export(weights)
        if self._sent is None:
            return whole_parts(exported, self._bucket)
        if base is None:
            return changed_parts(exported, None, None, self._bucket)
        return changed_parts(exported, self._export(base.tensors), base.version, self._bucket)

    async def _common_base(self, servers: Sequence[ServerApi]) -> Weights | None:
        """Return the weights that all these servers keep, as the servers themselves confirm; None: there are none.
        Until `send` has succeeded they are not known to keep any."""
        if self._sent is None:
            return None
        base = self._sent.base(servers)
        self._sent.forget(servers)
        if base is None:
            return None
        steps = UpdateSteps(servers)
        await steps.each(lambda server: server.check_kept(base.version), self._seconds)
        if steps.failed:
            log.warning("whole weights are sent, since servers do not keep the last ones; %s", listed(steps.failed))
        return None if steps.failed else base

    # -- an update ---------------------------------------------------------------------------------------------------

    async def _update_together(self, servers: list[ServerApi], parts: Parts, version: int) -> dict[str, str]:
        """Update all servers in one group; return the reasons of failures by URL."""
        if self._group is None or self._group.servers != servers:
            await self._leave_current()
            self._group, failed = await self._form_group(servers)
            if self._group is None:
                return failed
        try:
            return await self._update(self._group, parts, version)
        except BaseException:
            await self._leave_current()
            raise

    async def _update_alone(self, server: ServerApi, parts: Parts, version: int, failed: dict[str, str]) -> None:
        """Update one server in a group of its own; remove its entry from `failed`, or replace it by the new reason."""
        if not await server.is_alive():
            return
        sync_group, problems = await self._form_group([server])
        try:
            if sync_group is not None:
                problems = await self._update(sync_group, parts, version)
        finally:
            if sync_group is not None:
                await self._leave(sync_group)
        del failed[server.url]
        failed |= problems

    async def _update(self, sync_group: SyncGroup, parts: Parts, version: int) -> dict[str, str]:
        steps = UpdateSteps(sync_group.servers)
        await steps.each(lambda server: server.begin_update(), self._seconds)
        remaining = await asyncio.to_thread(parts)
        while (part := await asyncio.to_thread(next, remaining, None)) is not None:
            if steps.failed:  # a broadcast needs all members
                return {server.url: "another server failed" for server in sync_group.servers} | steps.failed
            await self._send_part(sync_group, part, version, steps)
            del part  # else it would exist while the next one is converted
        await steps.each(lambda server: server.end_update(version), self._seconds)
        return steps.failed

    async def _send_part(self, sync_group: SyncGroup, part: WeightPart, version: int, steps: UpdateSteps) -> None:
        """Send one broadcast; `steps` drops the servers that did not receive it."""
        group = sync_group.group
        assert group is not None
        ours = _in_thread(lambda: broadcast.broadcast(group, part.tensors, self._seconds))
        theirs = [
            asyncio.ensure_future(limited(part.receive(server, sync_group.name, version), self._seconds + GRACE))
            for server in sync_group.servers
        ]
        self.sent_bytes += sum(value.nbytes for value in part.tensors)
        steps.drop(await _wait_for_members(ours, theirs, sync_group))

    # -- groups ------------------------------------------------------------------------------------------------------

    async def _form_group(self, servers: list[ServerApi]) -> tuple[SyncGroup | None, dict[str, str]]:
        """Form a new group of the trainer and these servers; return the group, or the reasons of failures by URL."""
        host = own_address([server.url for server in servers])
        sync_group = SyncGroup(f"mtrl-{secrets.token_hex(8)}", servers, broadcast.open_store(host, self._seconds))
        port, size = sync_group.store.port, 1 + self._workers * len(servers)
        own = await asyncio.to_thread(broadcast.connect, host, port, self._seconds)  # now: the store may close early
        arguments = (self._backend, host, port, size, 0, sync_group.name, self._seconds, own)
        ours = _in_thread(lambda: broadcast.join_group(*arguments), undo=broadcast.leave)
        theirs = [
            asyncio.ensure_future(
                limited(
                    server.join(Rendezvous(host, port, size, 1 + self._workers * i, self._backend, sync_group.name)),
                    self._seconds + GRACE,
                )
            )
            for i, server in enumerate(servers)
        ]
        try:
            failed = await _wait_for_members(ours, theirs, sync_group)
        except BaseException:
            sync_group.store = None
            raise
        if failed:
            await self._leave(sync_group)
            return None, failed
        sync_group.group = ours.result()
        return sync_group, {}

    async def _leave_current(self) -> None:
        sync_group, self._group = self._group, None
        if sync_group is not None:
            await self._leave(sync_group)

    async def _leave(self, sync_group: SyncGroup) -> None:
        """Leave the group on the trainer's side first, so that no server waits for the trainer any more."""
        group, sync_group.group, sync_group.store = sync_group.group, None, None
        if group is not None:
            await asyncio.to_thread(broadcast.leave, group)
        steps = UpdateSteps(sync_group.servers)
        await steps.each(lambda server: server.leave(sync_group.name), min(self._seconds, LEAVE_TIMEOUT))


async def _wait_for_members(
    ours: asyncio.Future[Any], theirs: Sequence[asyncio.Future[None]], sync_group: SyncGroup
) -> dict[str, str]:
    """Wait until the trainer's part and the servers' parts of a collective operation are done, or one of them has
    failed, which ends the operation for all members. Return the reasons by URL; empty on success."""
    try:
        await asyncio.wait([ours, *theirs], return_when=asyncio.FIRST_EXCEPTION)
        if all(future.done() and not future.exception() for future in [ours, *theirs]):
            return {}
        if sync_group.group is None:
            await asyncio.wait([ours, *theirs], timeout=CONNECT_SECONDS)
            sync_group.store = None  # servers that wait there for other members get an error
        await asyncio.wait([ours])  # gloo cannot be cancelled, but has a timeout
        group, sync_group.group = sync_group.group, None
        if group is not None:
            await asyncio.to_thread(broadcast.leave, group)  # this ends the operation on the servers as well
        await asyncio.wait(theirs, timeout=LEAVE_TIMEOUT)
    finally:
        for future in theirs:
            future.cancel()
    first = ours.exception()
    common = "another server failed" if first is None else one_line(f"the trainer could not continue: {first}", 300)
    return {server.url: _failure(end) or common for server, end in zip(sync_group.servers, theirs, strict=True)}


def _failure(end: asyncio.Future[None]) -> str | None:
    """Return why a server's part failed, in the server's message; None if it succeeded."""
    if not end.done() or end.cancelled():
        return "no answer"
    return None if (error := end.exception()) is None else one_line(error, 500)


def _in_thread(call: Callable[[], Any], undo: Callable[[Any], None] | None = None) -> asyncio.Future[Any]:
    """Run a call in a daemon thread, which does not delay the end of the program.

    Args:
        undo: function that receives the result if the future was cancelled meanwhile.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if future.done():
            if error is None and undo is not None:
                undo(value)
        elif error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, problem = None, None
        try:
            value = call()
        except BaseException as error:
            problem = error.with_traceback(None)  # the frames of a traceback would keep the group alive
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, value, problem)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return future


def own_address(urls: Sequence[str]) -> str:
    """Return the address of this machine that the servers at these URLs can reach."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    remote = [host for host in hosts if not is_loopback(host)]
    if not remote:
        return LOOPBACK
    family = socket.getaddrinfo(remote[0], 9)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))  # connecting a UDP socket sends nothing
        return probe.getsockname()[0]
