"""The leader's work for rollout workers: requesting groups, reading the answers, and telling of new weights."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from synthetic import GROUP, make_turn

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.rollout.episode import BaseLoop, EpisodeLimits, Occupancy
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.workers import WorkerRollouts, Workers
from mtrl.types import Row, StopReason, Trajectory
from mtrl.utils.process import settle

TIMEOUT = 600.0
"""Time limit of any answer of a worker, in seconds."""
GROUPS = 16
"""Number of groups that are measured at once."""
CALLS = 50
"""Number of times that each worker is told of new weights."""
SHAPES = ((1, 64, 64), (1, 2048, 512), (8, 64, 64), (8, 256, 256), (32, 256, 256))
"""Numbers of turns of an episode, and of sampled and of observed tokens of a turn."""


@dataclass
class _Engine:
    """The part of an engine that a worker uses for other work than sampling."""

    version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)

    async def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Do nothing: the engine has no process."""


class SyntheticEpisodes(BaseLoop[None]):
    """Episodes of the sizes in their row, which take no time but that of making them."""

    def __init__(self) -> None:
        self.engine: Any = _Engine()
        self.sampling_clock = Occupancy()
        self.limits = EpisodeLimits(1000, 2**20, TIMEOUT, TIMEOUT, retries=0)

    @asynccontextmanager
    async def _open_trajectory(self, trajectory_id: str, sampling: SamplingParams) -> AsyncIterator[None]:
        yield None

    async def _run_episode(self, trajectory: Trajectory, handle: None, row: Row, sampling: SamplingParams) -> None:
        rng, (turns, sampled, observed) = random.Random(sampling.seed), row["ground_truth"]["shape"]
        trajectory.turns += [make_turn(rng, sampled, observed) for _ in range(turns)]
        trajectory.stop_reason = StopReason.DONE

    async def close(self) -> None:
        """Do nothing: the episodes share nothing."""


async def answer_costs(repeats: int, count: int = 2) -> tuple[list[list[float]], list[float], float]:
    """Measure `count` real workers.

    Returns:
        For each of `SHAPES` the numbers of groups, turns and tokens; the leader's least CPU seconds for them; and its
        CPU seconds to tell one worker of new weights.
    """
    from mtrl.rollout.cluster import RayCluster

    cluster = RayCluster((SyntheticEpisodes, 0, settle), count, WorkerResources(), 0)
    workers = Workers(cluster, count, TIMEOUT)
    await workers.start()
    rollouts = WorkerRollouts(SyntheticEpisodes(), 0, 0.0, workers=workers)

    async def collect(shape: Sequence[int]) -> float:
        row: Row = {"id": "0", "prompt": [], "ground_truth": {"shape": list(shape)}}
        start = time.process_time()
        await rollouts.collect("step", [row] * GROUPS, GROUP, SamplingParams())
        return time.process_time() - start

    try:
        await collect(SHAPES[0])
        found = [min([await collect(shape) for _ in range(repeats)]) for shape in SHAPES]
        start = time.process_time()
        for version in range(1, CALLS + 1):
            await workers.load_weights(None, version)
        call = (time.process_time() - start) / (CALLS * count)
    finally:
        await workers.close()
    episodes = GROUPS * GROUP
    rows = [[GROUPS, episodes * turns, episodes * turns * (a + b)] for turns, a, b in SHAPES]
    return [[float(number) for number in row] for row in rows], found, call
