"""Kills rollout workers at random moments while groups are sampled and trained with overlap, and audits every group.

    python experiments/kills/worker_kills.py                                 10,000 episodes, 20 kills
    python experiments/kills/worker_kills.py --steps 10 --kills 3 --seed 1

Workers are processes of Ray, and SIGKILL ends one of them, which may be running episodes, loading weights or starting.
Stream, admission, workers and processes are those of a run. The sampled tokens are a function of the episode's seed, so
that the audit can compute each of them again. An update is a pause. The exit status is 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from audit import Audit, Drawn, Plan
from targets import command_of, family, kill

from mtrl.config.schema import Config, RewardConfig
from mtrl.datasets import Splits
from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.episode import BaseLoop, EpisodeLimits, Occupancy
from mtrl.rollout.processes import Cluster
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.rollouts import stream_seed
from mtrl.rollout.workers import WorkerRollouts, Workers
from mtrl.trainer.data.stream import Stream
from mtrl.types import FinishReason, Group, Row, StopReason, Trajectory, Turn

TOKENS = 4
"""Number of tokens of a turn."""
TIMEOUT = 600.0
"""Time limit of any answer of a worker, in seconds."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the run. Each field is a command-line option."""

    workers: int = 3
    steps: int = 125
    prompts_per_step: int = 10
    group_size: int = 8
    turns: int = 3
    turn_seconds: float = 0.02
    """Mean seconds of a turn. A turn takes up to twice as long, depending on its seed."""
    update_seconds: float = 0.02
    max_steps_off_policy: int = 1
    kills: int = 20
    seed: int = 0

    @property
    def groups(self) -> int:
        return self.steps * self.prompts_per_step


@dataclass
class Result:
    """Counts of the run, and its faults."""

    episodes: int = 0
    """Number of trained episodes."""
    returned: int = 0
    """Number of episodes that workers returned to the leader."""
    kills: int = 0
    restarts: int = 0
    oldest: int = 0
    """Greatest age of a trained token, in training steps."""
    seconds: float = 0.0
    audit: Audit = field(default_factory=Audit)


class _Engine:
    """The part of an engine that a worker uses for other work than sampling."""

    def __init__(self) -> None:
        self.version, self.stats = 0, EngineStats()

    async def load_weights(self, weights: Any, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        """Do nothing: the engine has no process."""


class SeededEpisodes(BaseLoop[None]):
    """Episodes whose tokens and times are functions of their seeds, and whose tokens have the engine's version."""

    def __init__(self, turns: int, turn_seconds: float):
        self.engine: Any = _Engine()
        self.sampling_clock, self.turns, self.turn_seconds = Occupancy(), turns, turn_seconds
        self.limits = EpisodeLimits(turns, 1000, TIMEOUT, TIMEOUT, retries=0)

    @asynccontextmanager
    async def _open_trajectory(self, trajectory_id: str, sampling: SamplingParams) -> AsyncIterator[None]:
        yield None

    async def _run_episode(self, trajectory: Trajectory, handle: None, row: Row, sampling: SamplingParams) -> None:
        for number, ids in enumerate(tokens_of(sampling.seed, self.turns)):
            await asyncio.sleep(2 * self.turn_seconds * ids[0] / 255)
            turn = Turn([number], ids, [-0.5] * TOKENS, [(self.engine.version, TOKENS)], FinishReason.STOP, "", {})
            turn.reward = float(trajectory.index % 2)
            trajectory.turns.append(turn)
        trajectory.stop_reason = StopReason.DONE

    async def close(self) -> None:
        """Do nothing: the episodes share nothing."""


def tokens_of(seed: int, turns: int) -> list[list[int]]:
    """Return the token ids of each turn of the episode with this seed."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(TOKENS)] for _ in range(turns)]


# -- the run -----------------------------------------------------------------------------------------------------------


async def run(sizes: Sizes, cluster: Cluster, kill_one: Callable[[random.Random], bool]) -> Result:
    """Sample and train all groups while workers are killed, and audit what was trained.

    Args:
        kill_one: function that kills a random worker; it returns whether there was one.
    """
    result, numbers, start = Result(), iter(range(sys.maxsize)), time.monotonic()
    workers = Workers(cluster, sizes.workers, TIMEOUT)
    await workers.start()
    rollouts = WorkerRollouts(loop_of(sizes), sizes.seed, 0.0, workers=workers)
    rollouts.on_episode = lambda trajectory: setattr(result, "returned", result.returned + 1)
    stream = Stream(
        config_of(sizes),
        rollouts,
        RewardComposer(RewardConfig()),
        Family("kills", environment=BaseEnvironment, load=Splits, score=lambda trajectory, row: 1.0),
        SamplingParams(),
        lambda: row_of(next(numbers)),
    )
    killer = asyncio.ensure_future(kill_often(sizes, result, kill_one))
    found: list[Drawn] = []
    try:
        for step in range(sizes.steps):
            for group in (await stream.collect(step)).groups:
                found.append((group.group_id, group.row["id"]))
                audit_group(group, step, sizes, result)
            await asyncio.sleep(sizes.update_seconds)
            await workers.load_weights(None, step + 1)
            stream.publish(step + 1)
        result.restarts = int(workers.stats.extra["worker_restarts"])
    finally:
        killer.cancel()
        await stream.close()
        await workers.close()
    result.audit.compare(found, plan_of(sizes).drawn(sizes.groups))
    result.seconds = time.monotonic() - start
    return result


async def kill_often(sizes: Sizes, result: Result, kill_one: Callable[[random.Random], bool]) -> None:
    """Kill workers, each at most the time of two turns after a random number of episodes has been returned."""
    rng = random.Random(f"kills {sizes.seed}")
    total = sizes.groups * sizes.group_size
    for moment in sorted(rng.randrange(total * 9 // 10) for _ in range(sizes.kills)):
        while result.returned < moment:
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.uniform(0, 2 * sizes.turn_seconds))
        while not kill_one(rng):
            await asyncio.sleep(0.01)
        result.kills += 1


def audit_group(group: Group, step: int, sizes: Sizes, result: Result) -> None:
    """Compare the group with the episodes of its name, and the age of its tokens with the bound."""
    faults = result.audit.differences
    if len(group.trajectories) != sizes.group_size:
        faults.append(f"{group.group_id} has {len(group.trajectories)} episodes")
    for index, trajectory in enumerate(group.trajectories):
        name = f"{group.group_id}/{index}"
        expected = tokens_of(stream_seed(sizes.seed, group.group_id, index), sizes.turns)
        if [turn.action_ids for turn in trajectory.turns] != expected:
            faults.append(f"{name} has tokens of another episode")
        ages = [step - version for turn in trajectory.turns for version, _ in turn.version_spans]
        if not 0 <= min(ages) <= max(ages) <= sizes.max_steps_off_policy:
            faults.append(f"{name} has tokens that are {min(ages)} to {max(ages)} steps old")
        result.oldest = max(result.oldest, *ages)
        result.episodes += 1


def row_of(number: int) -> Row:
    return {"id": f"row{number}", "prompt": [], "ground_truth": {}}


def plan_of(sizes: Sizes) -> Plan:
    rows = [row_of(number)["id"] for number in range(sizes.groups)]
    return Plan(rows, sizes.prompts_per_step, sizes.steps, sizes.max_steps_off_policy)


def loop_of(sizes: Sizes) -> SeededEpisodes:
    return SeededEpisodes(sizes.turns, sizes.turn_seconds)


def config_of(sizes: Sizes) -> Config:
    config = Config(run_dir="unused", seed=sizes.seed)
    config.trainer.prompts_per_step, config.trainer.max_steps = sizes.prompts_per_step, sizes.steps
    config.algorithm.group_size = sizes.group_size
    config.async_config.max_steps_off_policy = sizes.max_steps_off_policy
    return config


# -- with Ray ----------------------------------------------------------------------------------------------------------


def kill_process(rng: random.Random) -> bool:
    """Send SIGKILL to one process of a worker, which may still be starting."""
    found = sorted(child for child in family(os.getpid()) if "_Actor" in command_of(child))
    if found:
        kill([rng.choice(found)])
    return bool(found)


def table(sizes: Sizes, result: Result) -> str:
    """Return the result as Markdown."""
    names = (
        "episodes",
        "kills",
        "restarts",
        "returned, not trained",
        "twice",
        "lost",
        "else",
        "oldest token",
        "seconds",
    )
    audit = result.audit
    cells: Sequence[float] = (
        result.episodes, result.kills, result.restarts, result.returned - result.episodes,
        len(audit.doubled), len(audit.lost), len(audit.differences), result.oldest, round(result.seconds),
    )  # fmt: skip
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|\n| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="%(default)s")
    sizes = Sizes(**vars(parser.parse_args()))
    from mtrl.rollout.cluster import RayCluster

    cluster = RayCluster((partial(loop_of, sizes), sizes.seed), sizes.workers, WorkerResources(), 0)
    result = asyncio.run(run(sizes, cluster, kill_process))
    print(table(sizes, result))
    print(json.dumps(asdict(sizes)))
    sys.exit("\n".join(result.audit.faults) or 0)


if __name__ == "__main__":
    main()
