"""Runs many episodes in containers side by side, and counts the episodes lost and the containers left.

    python -m experiments.containers.side_by_side                       200 episodes, all open at once
    python -m experiments.containers.side_by_side --episodes 40 --at-once 20
    python -m experiments.containers.side_by_side --engine docker

The exit status is 1 if an episode was lost or a container was left.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from envs.terminal import FAMILY
from experiments.containers.machine import Watch
from experiments.containers.tasks import Task, write_tasks
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.stepper import Stepper, TimedCalls, text_message, text_turn
from mtrl.sandbox.container_supervisor import owner_label
from mtrl.sandbox.engine_container import engine_path
from mtrl.types import Trajectory
from tests.container_root import ENGINES, need_engine
from tests.sandbox.container_kills import containers

THREADS = 16
"""Number of threads of environments, the default of environment.max_workers."""
STEP_SECONDS, EPISODE_SECONDS = 900.0, 3600.0
"""Time limits of environment=terminal."""


@dataclass
class Outcome:
    """What one episode came to."""

    error: str = ""
    """Reason why it was lost; empty if it was not."""
    score: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of its start, its turns and its end, in seconds, without the waits that stand for sampling."""


class SideBySide:
    """Episodes of which `at_once` are open together: no episode takes a turn before that many have started or failed.

    Args:
        think: mean of the wait before a turn, in seconds, which stands for sampling; exponentially distributed.
        engine: name of the container engine.
    """

    def __init__(self, at_once: int, think: float, engine: str = "podman"):
        self.gate, self.think, self.engine = asyncio.Semaphore(at_once), think, engine
        self.missing = at_once
        self.all_open = asyncio.Event()
        self.pool = EnvironmentPool(THREADS)

    async def run(self, tasks: list[Task]) -> list[Outcome]:
        """Run one episode of each task."""
        return await asyncio.gather(*(self._run(index, task) for index, task in enumerate(tasks)))

    async def _run(self, index: int, task: Task) -> Outcome:
        trajectory = Trajectory(task_id=task.row["id"], group_id=task.row["id"], index=0)
        call = TimedCalls(self.pool, STEP_SECONDS, EPISODE_SECONDS)
        outcome = Outcome()
        async with self.gate:
            stepper = Stepper(lambda: FAMILY.environment(backend=self.engine), call, trajectory, task.row, 8)
            try:
                await self._timed(outcome, "start", self._open(stepper))
                await self.all_open.wait()
                await self._turns(stepper, task, outcome, random.Random(index))
            except Exception as error:
                outcome.error = f"{type(error).__name__}: {error}"
            finally:
                await self._timed(outcome, "end", stepper.close(self.pool, STEP_SECONDS))
        outcome.score = FAMILY.score(trajectory, task.row)
        return outcome

    async def _open(self, stepper: Stepper) -> None:
        try:
            await stepper.open()
        finally:
            self.missing -= 1
            if self.missing <= 0:
                self.all_open.set()

    async def _turns(self, stepper: Stepper, task: Task, outcome: Outcome, rng: random.Random) -> None:
        for response in task.responses:
            await asyncio.sleep(rng.expovariate(1 / self.think))
            turn = text_turn(response, [], text_message(response, stepper.tools, len(stepper.trajectory.turns)))
            stepper.trajectory.turns.append(turn)
            await self._timed(outcome, "turns", stepper.take(turn))

    async def _timed(self, outcome: Outcome, name: str, work: Awaitable[Any]) -> None:
        """Add the wall time of an awaitable to that of an outcome."""
        begun = time.perf_counter()
        try:
            await work
        finally:
            outcome.seconds[name] = outcome.seconds.get(name, 0.0) + time.perf_counter() - begun


def report(outcomes: list[Outcome], watch: Watch, wall: float, left: int) -> str:
    """Return the figures of the drill as text."""
    lost = [outcome for outcome in outcomes if outcome.error]
    own, clients = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu, busy = [each.ru_utime + each.ru_stime for each in (own, clients)], watch.busy_seconds()
    lines = [
        f"{len(outcomes)} episodes, {len(lost)} lost, {sum(outcome.score for outcome in outcomes):g} solved",
        f"{watch.most_containers} containers open at once, {left} left",
        f"{wall:.0f} s of wall time",
        f"CPU time: {cpu[0]:.0f} s of this process, {cpu[1]:.0f} s of engine clients with those of "
        f"the drill's own looks, {busy:.0f} s of the machine",
        f"peak memory: {own.ru_maxrss >> 10} MiB of this process, {watch.most_memory >> 20} MiB of the engine",
    ]
    if watch.failures:
        lines.append(f"{watch.failures} looks at the machine failed, so the largest values may be too low")
    for name in ("start", "turns", "end"):
        seconds = sorted(outcome.seconds[name] for outcome in outcomes if name in outcome.seconds)
        lines += [f"{name}: median {median(seconds):.1f} s, longest {seconds[-1]:.1f} s"] if seconds else []
    reasons = Counter(outcome.error for outcome in lost)
    return "\n".join([*lines, *(f"lost {count} times: {reason[:300]}" for reason, count in reasons.most_common(5))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="number of episodes")
    parser.add_argument("--at-once", type=int, help="maximum number of open episodes (default: all)")
    parser.add_argument("--think", type=float, default=20.0, help="mean seconds of sampling before each turn")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="program of the containers")
    args = parser.parse_args()
    at_once = min(args.at_once or args.episodes, args.episodes)
    label = owner_label(engine_path(args.engine))
    with tempfile.TemporaryDirectory() as folder:
        need_engine(args.engine, Path(folder) / "image")
        tasks = write_tasks(Path(folder) / "tasks", args.episodes, args.engine)
        begun = time.perf_counter()
        with Watch(lambda: len(containers(args.engine, label))) as watch:
            outcomes = asyncio.run(SideBySide(at_once, args.think, args.engine).run(tasks))
        wall, left = time.perf_counter() - begun, len(containers(args.engine, label))
    print(report(outcomes, watch, wall, left))
    sys.exit(int(left > 0 or any(outcome.error for outcome in outcomes)))


if __name__ == "__main__":
    main()
