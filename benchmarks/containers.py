"""Seconds of the start of a container, of one command and of a whole episode of terminal, one after another.

    python -m benchmarks.containers [--repeats 10] [--engine docker]

An episode has three commands and its tests, and no sampling. Starts, commands and episodes are timed alternately in one
process. A warm start takes a container that was started before (`environment.config.warm_containers`), which is the
part of an episode that this setting saves; the time of the next one, in the background, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bounds import check_sizes

from envs.terminal import FAMILY
from experiments.containers.tasks import Task, write_tasks
from mtrl.sandbox.container import ContainerLimits
from mtrl.sandbox.engine_container import EngineContainer
from mtrl.sandbox.warm_containers import ContainerKind, WarmContainers
from mtrl.utils.process import usable_cores
from tests.container_root import ENGINES, IMAGE, need_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each kind")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="program of the containers")
    args = parser.parse_args()
    check_sizes(parser, args)
    taken: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        need_engine(args.engine, Path(folder) / "image")
        for task in write_tasks(Path(folder) / "tasks", args.repeats, args.engine):
            container = EngineContainer(args.engine, IMAGE, ContainerLimits(memory="64m"), "/app")
            kind = ContainerKind(args.engine, IMAGE, ContainerLimits(memory="64m"), "/app")
            warm = StartedBefore(kind)
            for name, work in (
                ("start", container.start),
                ("warm start", warm.take),
                ("command", lambda one=container: one.run("true", 60)),
                ("removal", container.remove),
                ("episode", lambda one=task: play(one, args.engine)),
            ):
                taken.setdefault(name, []).append(timed(work))
            warm.remove()
    print(f"{platform.machine()}, {usable_cores()} cores; {args.engine}, medians of {args.repeats} repeats")
    whole = [median(times) for times in zip(*taken["episode"], strict=True)]
    for name, measured in taken.items():
        wall, cpu = (median(times) for times in zip(*measured, strict=True))
        shares = f"{wall / whole[0]:.0%} and {cpu / whole[1]:.0%} of the episode"
        print(
            f"{name:>10}: {wall:.2f} s of wall time, {cpu:.2f} s of CPU time of this process and its clients; {shares}"
        )


class StartedBefore:
    """A container that waits from now on."""

    def __init__(self, kind: ContainerKind):
        self.kind, self.others = kind, WarmContainers(1)
        self.others.refill(kind)
        for thread in threading.enumerate():
            if thread.name == "warm-container":
                thread.join()

    def take(self) -> None:
        self.container = self.others.take(self.kind)
        assert self.container is not None

    def remove(self) -> None:
        assert self.container is not None
        self.container.remove()


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
