"""Weight sync from the trainer to servers: the protocol, and the steps that its implementations share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from mtrl.config.engine_schema import ServerConfig
from mtrl.distributed.gathered import GatheredWeights
from mtrl.engines.server.server_api import ServerApi, ServerError, ServerUnreachableError
from mtrl.utils.text import one_line

T = TypeVar("T")

GRACE = 2.0
"""Seconds added to a client timeout, so that the server's own timeout, whose error has more details, expires first."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of a policy version, stored for servers that are restarted."""

    tensors: Mapping[str, Tensor]
    version: int

    @classmethod
    def copy(cls, tensors: Mapping[str, Tensor], version: int) -> Weights:
        if isinstance(tensors, GatheredWeights):  # the tensors belong to their reader
            return cls({name: tensors[name] for name in tensors}, version)
        return cls({name: tensor.detach().clone() for name, tensor in tensors.items()}, version)


def listed(failed: Mapping[str, str]) -> str:
    """Return the reasons by URL as text."""
    return "; ".join(f"{url}: {reason}" for url, reason in failed.items())


class SyncError(ServerError):
    """Some servers did not receive the weights; all other servers did."""

    def __init__(self, failed: Mapping[str, str]):
        """`failed`: the reason, in the server's message, by the URL of the server."""
        self.failed = dict(failed)
        super().__init__(f"new weights did not reach {len(self.failed)} servers ({listed(self.failed)})")


class WeightSync(Protocol):
    """Protocol for sending weights to servers that are paused or sample no turns."""

    sent_bytes: int
    """Bytes of weights that the last `send` sent; what all servers received at once counts once."""

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Do the part of `send` for which servers need not pause; `send` with the same object follows.

        Raises:
            UserError: the weights cannot be sent.
        """

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        """Make all these servers load `weights` (by the names of a Hugging Face checkpoint, tied ones once) as policy
        `version`, with all steps from `begin_update` to `end_update`. Each step has a timeout, and after a failure no
        process waits. The tensors must not change until the next `send` has ended.

        Raises:
            SyncError: some servers did not receive the weights; `failed` of the error names them. All others did.
        """

    async def close(self) -> None:
        """Leave process groups, and remove the files that were written."""


def engine_key(settings: ServerConfig) -> str:
    """Return the key of these settings in a configuration, such as `generator.vllm`."""
    return f"generator.{type(settings).__name__.removesuffix('Config').lower()}"


class UpdateSteps:
    """Servers that take the steps of an update in parallel. A server that fails a step is left out of later steps."""

    def __init__(self, servers: Sequence[ServerApi]):
        self.remaining = list(servers)
        self.failed: dict[str, str] = {}

    async def each(self, step: Callable[[ServerApi], Awaitable[object]], seconds: float) -> None:
        """Take a step on all remaining servers in parallel, with a timeout of `seconds`."""
        ends = await asyncio.gather(*(_end_of(step(server), seconds) for server in self.remaining))
        results = zip(self.remaining, ends, strict=True)
        self.drop({server.url: problem for server, problem in results if problem is not None})

    def drop(self, failed: Mapping[str, str]) -> None:
        """Leave these servers out of later steps; `failed` has the reasons by URL."""
        self.failed |= failed
        self.remaining = [server for server in self.remaining if server.url not in failed]

    def check(self) -> None:
        """Raise an error if servers have failed.

        Raises:
            SyncError: some servers have failed.
        """
        if self.failed:
            raise SyncError(self.failed)


async def limited(call: Awaitable[T], seconds: float) -> T:
    """Await a call with a timeout of `seconds + GRACE`.

    Raises:
        ServerUnreachableError: the call timed out.
    """
    try:
        async with asyncio.timeout(seconds + GRACE):
            return await call
    except TimeoutError:
        raise ServerUnreachableError(f"no answer within {seconds:g} s") from None


async def _end_of(step: Awaitable[object], seconds: float) -> str | None:
    """Await a step; return why it failed, or None if it succeeded."""
    try:
        await limited(step, seconds)
    except ServerError as error:
        return one_line(error, 500)
    return None
