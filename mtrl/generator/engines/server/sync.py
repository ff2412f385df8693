"""How weights get from the trainer to servers: one class per way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.generator.engines.server.api import ServerApi, ServerError, ServerGoneError
from mtrl.tracking.text import one_line

T = TypeVar("T")

GRACE = 2.0
"""Seconds for which a server's own time limit comes first: it says more."""


class SyncError(ServerError):
    """Some servers have not got the weights; all others have."""

    def __init__(self, failed: Mapping[str, str]):
        """`failed`: what went wrong, in the server's words, by its URL."""
        self.failed = dict(failed)
        told = "; ".join(f"{url}: {words}" for url, words in self.failed.items())
        super().__init__(f"new weights did not reach {len(self.failed)} servers ({told})")


class WeightSync(Protocol):
    """Sends weights to servers that are paused, or that sample nothing."""

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        """Let all these servers load `weights` (by the names of a Hugging Face checkpoint, tied ones once) as policy
        `version`: `begin_update` to `end_update`. Each step has a time limit, and a failure leaves nothing waiting.

        Raises:
            SyncError: some server has not got them; its `failed` names which, the others have them.
        """

    async def close(self) -> None:
        """Give up groups, and remove what was written."""


def make_sync(settings: ServerConfig, *, model: str, dtype: str, lora_scaling: float | None) -> WeightSync:
    """The way that `settings` names.

    Args:
        model: folder or Hub name of the model that the servers start with.
        dtype: of the servers' weights, as torch calls it; what is sent has it.
        lora_scaling: what the product of adapters counts, where adapters are what is trained; `send` gets them then,
            as `adapter_state` names them.

    Raises:
        UserError: this way does not lead to these servers.
    """
    from mtrl.generator.engines.server.disk_sync import DiskSync
    from mtrl.generator.engines.server.distributed_sync import DistributedSync
    from mtrl.generator.engines.server.lora_sync import AdapterSync, Merged
    from mtrl.generator.engines.server.outgoing import Whole
    from mtrl.generator.engines.server.tensor_sync import TensorSync

    if lora_scaling is not None and settings.lora == "adapter":
        return AdapterSync(settings, model, lora_scaling)
    outgoing = Whole(model, dtype) if lora_scaling is None else Merged(model, dtype, lora_scaling)
    match settings.weight_sync:
        case "disk":
            return DiskSync(settings, model, outgoing)
        case "distributed":
            return DistributedSync(settings, outgoing)
        case "tensor":
            return TensorSync(settings, outgoing)
    raise ValueError(f"weight_sync={settings.weight_sync} is none of disk, distributed and tensor")


def engine_key(settings: ServerConfig) -> str:
    """What these settings are called in a configuration."""
    return f"generator.{type(settings).__name__.removesuffix('Config').lower()}"


class Company:
    """Servers that take the steps of an update together; one that fails a step takes no more."""

    def __init__(self, servers: Sequence[ServerApi]):
        self.left = list(servers)
        self.failed: dict[str, str] = {}

    async def each(self, step: Callable[[ServerApi], Awaitable[object]], seconds: float) -> None:
        """Take a step on all at once, in at most so many seconds."""
        ends = await asyncio.gather(*(_end_of(step(server), seconds) for server in self.left))
        words = {server.url: said for server, said in zip(self.left, ends, strict=True) if said is not None}
        self.drop(words)

    def drop(self, failed: Mapping[str, str]) -> None:
        """These have failed, by URL."""
        self.failed |= failed
        self.left = [server for server in self.left if server.url not in failed]

    def check(self) -> None:
        """
        Raises:
            SyncError: some have failed.
        """
        if self.failed:
            raise SyncError(self.failed)


async def limited(call: Awaitable[T], seconds: float) -> T:
    """
    Raises:
        ServerGoneError: it took longer.
    """
    try:
        async with asyncio.timeout(seconds + GRACE):
            return await call
    except TimeoutError:
        raise ServerGoneError(f"no answer within {seconds:g} s") from None


async def _end_of(step: Awaitable[object], seconds: float) -> str | None:
    """Why it failed; None: it did not."""
    try:
        await limited(step, seconds)
    except ServerError as error:
        return one_line(error, 500)
    return None
