"""Seconds of the start of a container, of one command and of a whole episode of terminal, one after another.

    python -m benchmarks.containers [--repeats 10] [--engine docker]

An episode has three commands and its tests, and no sampling. Starts, commands and episodes are timed alternately in one
process. The start is the part that containers started in advance would save.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from envs.terminal import FAMILY
from experiments.containers.tasks import Task, write_tasks
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.engine_container import EngineContainer
from mtrl.utils.process import usable_cores
from tests.container_root import ENGINES, IMAGE, need_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each kind")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="program of the containers")
    args = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        need_engine(args.engine, Path(folder) / "image")
        for task in write_tasks(Path(folder) / "tasks", args.repeats, args.engine):
            container = EngineContainer(args.engine, IMAGE, ContainerLimits(memory="64m"), "/app")
            for name, work in (
                ("start", container.start),
                ("command", lambda one=container: one.run("true", 60)),
                ("removal", container.remove),
                ("episode", lambda one=task: play(one, args.engine)),
            ):
                taken.setdefault(name, []).append(timed(work))
    print(f"{platform.machine()}, {usable_cores()} cores; {args.engine}, medians of {args.repeats} repeats")
    whole = [median(times) for times in zip(*taken["episode"], strict=True)]
    for name, measured in taken.items():
        wall, cpu = (median(times) for times in zip(*measured, strict=True))
        shares = f"{wall / whole[0]:.0%} and {cpu / whole[1]:.0%} of the episode"
        print(
            f"{name:>8}: {wall:.2f} s of wall time, {cpu:.2f} s of CPU time of this process and its clients; {shares}"
        )


def play(task: Task, engine: str) -> None:
    """Run an episode and check that it solves its task."""

    async def run() -> float:
        environment = FAMILY.environment(backend=engine)
        try:
            await environment.reset(task.row)
            results = [await environment.step(response, task.row["ground_truth"]) for response in task.responses]
            return results[-1].reward
        finally:
            environment.close()

    assert asyncio.run(run()) == 1.0


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time of a call, and the CPU time of this process and of its ended children, in seconds."""
    begun, used = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - begun, cpu_seconds() - used


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
