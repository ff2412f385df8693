"""New weights on their way to the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrl.generator.engines.base import Engine
from mtrl.trainer.canary import Canary, WrongWeightsError
from mtrl.trainer.desk import Desk
from mtrl.trainer.learners import Learners

if TYPE_CHECKING:
    from mtrl.generator.engines.server.engine import ServerEngine

log = logging.getLogger(__name__)


@dataclass
class Publisher:
    """Lets an engine sample by the present weights."""

    engine: Engine
    learners: Learners
    desk: Desk
    sends_weights: bool
    """Whether the engine has weights of its own; else the present ones are its own."""
    canary: Canary | None = None
    """Checks what servers sample by."""
    given: bool = False
    """Whether the servers were started by somebody else, and may have any weights."""
    colocated: ServerEngine | None = None
    """Servers that give their memory to the trainer while it learns."""

    async def begin(self, version: int) -> None:
        """Before the first turn: the engine has the weights that a run starts from, or gets those that it goes on with.

        Raises:
            UserError: as `publish` does.
        """
        await (self.publish(version) if version or self.given else self.check(version))

    async def publish(self, version: int) -> dict[str, float]:
        """Returns what the canary measured.

        Raises:
            UserError: the weights do not reach the engine, or are others there.
        """
        weights = await self.desk.do(self.learners.weights) if self.sends_weights else None
        await self.engine.load_weights(weights, version)
        try:
            return await self.check(version)
        except WrongWeightsError as error:
            log.warning("version %d is sent again: %s", version, error)
        await self.engine.load_weights(weights, version)
        return await self.check(version)

    async def check(self, version: int) -> dict[str, float]:
        """Compare what the engine samples by with what the trainer has.

        Raises:
            WrongWeightsError: they differ.
        """
        return {} if self.canary is None else await self.canary.check(version)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[Any]:
        """While this lasts, servers that share GPUs with the trainer leave them to it; without them nothing changes."""
        if self.colocated is None:
            yield
            return
        await self.colocated.sleep()
        yield
        await self.desk.do(self.learners.release)
        await self.colocated.wake()
