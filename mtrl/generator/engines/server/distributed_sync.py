"""Weights by broadcast from the trainer to all servers at once: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.distributed import broadcast
from mtrl.errors import UserError
from mtrl.generator.engines.server.api import Rendezvous, ServerApi, TensorLayout
from mtrl.generator.engines.server.checksum import checksum
from mtrl.generator.engines.server.outgoing import Outgoing
from mtrl.generator.engines.server.sync import GRACE, Company, engine_key, limited
from mtrl.tracking.text import one_line

BUCKET = 2**29
"""Bytes of one broadcast."""
PARTING = 10.0
"""Seconds in which a server leaves a group; one that does not has other sorrows."""
ARRIVAL = 2.0
"""Seconds in which servers connect to the meeting that they were asked to; one that finds it closed would try again
until its own time limit, which SGLang has at half an hour."""
LOOPBACK = "127.0.0.1"

Part = list[tuple[str, Tensor]]


@dataclass
class Meeting:
    """The trainer and some servers in one group."""

    name: str
    servers: list[ServerApi]
    store: Any
    """Where they found each other; without it nobody waits."""
    group: broadcast.Group | None = None


class DistributedSync:
    """See `WeightSync`. All servers are in one group, which is met again when they are others.

    A member that dies or hangs in the middle ends the broadcast for all, after the time limit at the latest. Then each
    of those that still answer gets the weights alone, so that only who is ill has failed.
    """

    def __init__(self, settings: ServerConfig, outgoing: Outgoing, bucket: int = BUCKET):
        """
        Raises:
            UserError: trainer and servers share GPUs, which NCCL cannot do.
        """
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        if settings.colocate and self._backend == "nccl":
            raise UserError(
                f"{engine_key(settings)}.weight_sync=distributed cannot reach servers on the trainer's own GPUs, which "
                f"NCCL refuses; with {engine_key(settings)}.colocate take weight_sync=tensor or disk"
            )
        self._seconds, self._workers = settings.sync_timeout, settings.tensor_parallel_size
        self._outgoing, self._bucket = outgoing, bucket
        self._kept: Meeting | None = None

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        whole = await asyncio.to_thread(self._outgoing, weights)
        parts = list(broadcast.buckets(list(whole.items()), self._bucket))
        failed = await self._together(list(servers), parts, version)
        if failed:
            await self._part()
            ill = [server for server in servers if server.url in failed]
            await asyncio.gather(*(self._alone(server, parts, version, failed) for server in ill))
        final = Company(servers)
        final.drop(failed)
        final.check()

    async def close(self) -> None:
        await self._part()

    # -- an update ---------------------------------------------------------------------------------------------------

    async def _together(self, servers: list[ServerApi], parts: list[Part], version: int) -> dict[str, str]:
        """An update of all in one group; why it failed, by URL."""
        if self._kept is None or self._kept.servers != servers:
            await self._part()
            self._kept, failed = await self._meet(servers)
            if self._kept is None:
                return failed
        try:
            return await self._update(self._kept, parts, version)
        except BaseException:
            await self._part()
            raise

    async def _alone(self, server: ServerApi, parts: list[Part], version: int, failed: dict[str, str]) -> None:
        """An update of one in a group of its own; `failed` loses its entry, or gets a new one."""
        if not await server.is_alive():
            return
        meeting, words = await self._meet([server])
        try:
            if meeting is not None:
                words = await self._update(meeting, parts, version)
        finally:
            if meeting is not None:
                await self._leave(meeting)
        del failed[server.url]
        failed |= words

    async def _update(self, meeting: Meeting, parts: list[Part], version: int) -> dict[str, str]:
        company = Company(meeting.servers)
        await company.each(lambda server: server.begin_update(), self._seconds)
        for part in parts:
            if company.failed:  # a broadcast needs all members
                return {server.url: "another server failed" for server in meeting.servers} | company.failed
            await self._send_part(meeting, part, version, company)
        await company.each(lambda server: server.end_update(version), self._seconds)
        return company.failed

    async def _send_part(self, meeting: Meeting, part: Part, version: int, company: Company) -> None:
        """One broadcast; servers that have not got it leave the company."""
        layouts = [TensorLayout(name, str(value.dtype)[len("torch.") :], tuple(value.shape)) for name, value in part]
        word = await asyncio.to_thread(checksum, dict(part))
        group = meeting.group
        assert group is not None
        ours = _in_thread(lambda: broadcast.broadcast(group, [value for _, value in part], self._seconds))
        theirs = [
            asyncio.ensure_future(
                limited(server.receive_broadcast(layouts, meeting.name, version, word), self._seconds + GRACE)
            )
            for server in meeting.servers
        ]
        company.drop(await _ends(ours, theirs, meeting))

    # -- meetings ----------------------------------------------------------------------------------------------------

    async def _meet(self, servers: list[ServerApi]) -> tuple[Meeting | None, dict[str, str]]:
        """A new group of the trainer and these servers; or why there is none, by URL."""
        host = own_address([server.url for server in servers])
        meeting = Meeting(f"mtrl-{secrets.token_hex(8)}", servers, broadcast.open_store(host, self._seconds))
        port, size = meeting.store.port, 1 + self._workers * len(servers)
        own = await asyncio.to_thread(broadcast.connect, host, port, self._seconds)  # first: it may be closed early
        arguments = (self._backend, host, port, size, 0, meeting.name, self._seconds, own)
        ours = _in_thread(lambda: broadcast.join_group(*arguments), undo=broadcast.leave)
        theirs = [
            asyncio.ensure_future(
                limited(
                    server.join(Rendezvous(host, port, size, 1 + self._workers * i, self._backend, meeting.name)),
                    self._seconds + GRACE,
                )
            )
            for i, server in enumerate(servers)
        ]
        try:
            failed = await _ends(ours, theirs, meeting)
        except BaseException:
            meeting.store = None
            raise
        if failed:
            await self._leave(meeting)
            return None, failed
        meeting.group = ours.result()
        return meeting, {}

    async def _part(self) -> None:
        meeting, self._kept = self._kept, None
        if meeting is not None:
            await self._leave(meeting)

    async def _leave(self, meeting: Meeting) -> None:
        """Close our side first: a server that still waits for us then does not."""
        group, meeting.group, meeting.store = meeting.group, None, None
        if group is not None:
            await asyncio.to_thread(broadcast.leave, group)
        company = Company(meeting.servers)
        await company.each(lambda server: server.leave(meeting.name), min(self._seconds, PARTING))


async def _ends(ours: asyncio.Future[Any], theirs: Sequence[asyncio.Future[None]], meeting: Meeting) -> dict[str, str]:
    """Wait until the trainer's part and the servers' parts of something common are done, or one of them has failed,
    which ends it for all; why, by URL."""
    try:
        await asyncio.wait([ours, *theirs], return_when=asyncio.FIRST_EXCEPTION)
        if all(future.done() and not future.exception() for future in [ours, *theirs]):
            return {}
        if meeting.group is None:
            await asyncio.wait([ours, *theirs], timeout=ARRIVAL)
            meeting.store = None  # who waits for others there gets an error
        await asyncio.wait([ours])  # gloo cannot be cut short; it has its time limit
        group, meeting.group = meeting.group, None
        if group is not None:
            await asyncio.to_thread(broadcast.leave, group)  # and the servers' side is over, too
        await asyncio.wait(theirs, timeout=PARTING)
    finally:
        for future in theirs:
            future.cancel()
    first = ours.exception()
    common = "another server failed" if first is None else one_line(f"the trainer could not go on: {first}", 300)
    return {server.url: _words(end) or common for server, end in zip(meeting.servers, theirs, strict=True)}


def _words(end: asyncio.Future[None]) -> str | None:
    """What a server said when it failed."""
    if not end.done() or end.cancelled():
        return "no answer"
    return None if (error := end.exception()) is None else one_line(error, 500)


def _in_thread(call: Callable[[], Any], undo: Callable[[Any], None] | None = None) -> asyncio.Future[Any]:
    """Do it in a thread that the end of the program does not wait for.

    Args:
        undo: gets what came out where nobody wants it any more.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
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
            problem = error.with_traceback(None)  # whose frames would keep the group
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, value, problem)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return future


def own_address(urls: Sequence[str]) -> str:
    """The address of this machine that servers there reach."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    far = [host for host in hosts if not broadcast.is_loopback(host)]
    if not far:
        return LOOPBACK
    family = socket.getaddrinfo(far[0], 9)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far[0], 9))  # which sends nothing
        return probe.getsockname()[0]
