"""The embedded engine in several processes, each with a copy of the model: one for each GPU of a machine, or several on
its CPU cores."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add

from torch import Tensor

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.process import ProcessEngine
from mtrl.types import Generation


class ReplicatedEngine:
    """See `mtrl.engines.base.Engine`: several `ProcessEngine`s, among which the groups are divided.

    All trajectories of a group are sampled by one replica, which computes their prompt once. The replica follows from
    the name of the group alone, so a resumed run repeats the batches of the run that it continues.
    """

    def __init__(self, memory: EngineMemory, replicas: int, threads: int = 1, on_gpus: bool = False):
        """Start all processes and wait until their engines are ready.

        Args:
            memory: the model and its settings.
            replicas: number of processes.
            threads: number of CPU threads of each process.
            on_gpus: whether each process sees one GPU, the first process the first one.

        Raises:
            UserError: an engine cannot start.
        """
        self._memory = memory
        start = partial(ProcessEngine, memory, threads)
        with ThreadPoolExecutor(replicas) as pool:
            starts = [pool.submit(start, gpu=index if on_gpus else None) for index in range(replicas)]
        failed = next((error for one in starts if (error := one.exception())), None)
        self._replicas = [one.result() for one in starts if one.exception() is None]
        if failed is not None:
            for replica in self._replicas:
                replica.end()
            raise failed

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas."""
        return [replica.pid for replica in self._replicas]

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return min(replica.version for replica in self._replicas)

    @version.setter
    def version(self, version: int) -> None:
        for replica in self._replicas:
            replica.version = version

    @property
    def stats(self) -> EngineStats:
        return reduce(add, (replica.stats for replica in self._replicas))

    def open(self, trajectory_id: str) -> None:
        self._of(trajectory_id).open(trajectory_id)

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `Engine`. It raises the errors of `ProcessEngine.generate`."""
        return await self._of(trajectory_id).generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        self._of(trajectory_id).release(trajectory_id)

    async def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Write these weights to the shared memory once, and return when every replica samples under them as policy
        `version`. It raises the errors of `ProcessEngine.load_weights`."""
        # A caller that is cancelled must not let the next call overwrite weights that a replica still reads.
        await asyncio.shield(asyncio.get_running_loop().create_task(self._load(weights, version)))

    async def close(self) -> None:
        """End all processes, even in the middle of their work, and abort unanswered turns."""
        for replica in self._replicas:
            await replica.close()
        self._memory.close()

    async def _load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        if weights is not None:
            for replica in self._replicas:
                replica.attach()  # so that the answers of all are read, for which the write waits
            await self._memory.weights.write(weights)
        await asyncio.gather(*(replica.load_weights(None, version) for replica in self._replicas))

    def _of(self, trajectory_id: str) -> ProcessEngine:
        return self._replicas[replica_of(trajectory_id, len(self._replicas))]


def replica_of(trajectory_id: str, replicas: int) -> int:
    """Return the index of the replica for a trajectory `group/index`: the last number in the name of its group modulo
    `replicas`, since groups are numbered; a checksum of a name without a number."""
    group = trajectory_id.rpartition("/")[0]
    numbers = re.findall(r"\d+", group)
    return (int(numbers[-1]) if numbers else zlib.crc32(group.encode())) % replicas
