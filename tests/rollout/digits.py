"""Episodes without a model and a tokenizer, for rollout workers. Not a test."""

import asyncio
import os
from contextlib import asynccontextmanager
from types import SimpleNamespace

from mtrl.engines.base import EngineStats
from mtrl.rollout.episode import BaseLoop, EpisodeLimits, Occupancy
from mtrl.types import FinishReason, StopReason, Turn


class Engine:
    """The part of an engine that a worker uses for other work than sampling."""

    def __init__(self):
        self.version, self.stats = 0, EngineStats()

    async def load_weights(self, weights, version):
        self.version = version

    async def close(self):
        pass


class Digits(BaseLoop):
    """Each turn samples digits that depend on the seed of the episode alone, after `pause` seconds."""

    def __init__(self, turns=3, pause=0.0):
        self.engine, self.sampling_clock, self.turns, self.pause = Engine(), Occupancy(), turns, pause
        self.limits = EpisodeLimits(turns, 100, 60.0, 600.0, 0)

    @asynccontextmanager
    async def _open_trajectory(self, trajectory_id, sampling):
        yield SimpleNamespace(id=trajectory_id)

    async def _run_episode(self, trajectory, handle, row, sampling):
        for turn in range(self.turns):
            await asyncio.sleep(self.pause)
            ids = [(sampling.seed >> (8 * turn + n)) % 10 for n in range(4)]
            message = {"role": "assistant", "content": str(ids)}
            spans = [(self.engine.version, 4)]
            trajectory.turns.append(Turn([turn], ids, [-0.5] * 4, spans, FinishReason.STOP, str(ids), message))
        trajectory.metrics["pid"] = os.getpid()
        trajectory.stop_reason = StopReason.DONE

    async def close(self):
        pass
