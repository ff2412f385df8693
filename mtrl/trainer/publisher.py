"""Transfer of new weights to the engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtrl.engines.base import Engine
from mtrl.trainer.canary import Canary, WrongWeightsError
from mtrl.trainer.update.learner import Learners
from mtrl.trainer.work_thread import WorkThread

if TYPE_CHECKING:
    from mtrl.engines.local.engine import LocalEngine
    from mtrl.engines.server.engine import ServerEngine
    from mtrl.rollout.served_workers import ServedWorkers

log = logging.getLogger(__name__)


@dataclass
class Publisher:
    """Keeps the engine's weights equal to the trainer's."""

    engine: Engine
    learners: Learners
    work_thread: WorkThread
    sends_weights: bool
    """Whether the engine has its own copy of the weights, which must be sent; else it shares the trainer's."""
    canary: Canary | None = None
    """Check of the weights that servers sample with; None: no check."""
    external: bool = False
    """Whether the servers were not started by mtrl, so that their weights are unknown."""
    colocated: ServerEngine | ServedWorkers | LocalEngine | None = None
    """The engine if it frees memory for the trainer during updates, else None."""

    async def begin(self, version: int) -> None:
        """Prepare the engine for the first turn. The weights are sent to servers that mtrl did not start, and to any
        engine of a resumed run; else the engine already has the initial weights, which are only checked.

        Raises:
            UserError: as for `publish`.
        """
        await (self.publish(version) if version or self.external else self.check(version))

    async def publish(self, version: int) -> dict[str, float]:
        """Load the current weights into the engine and check them. Return the metrics of the canary.

        Raises:
            UserError: the weights do not reach the engine, or the engine samples with other weights.
        """
        weights = await self.work_thread.do(self.learners.weights) if self.sends_weights else None
        await self.engine.load_weights(weights, version)
        try:
            return await self.check(version)
        except WrongWeightsError as error:
            log.warning("version %d is sent again: %s", version, error)
        await self.engine.load_weights(weights, version)
        return await self.check(version)

    async def check(self, version: int) -> dict[str, float]:
        """Compare the engine's weights with the trainer's by the canary. Return its metrics.

        Raises:
            WrongWeightsError: the weights differ.
        """
        return {} if self.canary is None else await self.canary.check(version)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[Any]:
        """Within this context, a colocated engine frees the memory of its weights, which `publish` then sends again;
        with another engine it has no effect."""
        if self.colocated is None:
            yield
            return
        await self.colocated.sleep()
        yield
        await self.work_thread.do(self.learners.release)
        await self.colocated.wake()
