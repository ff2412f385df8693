"""A cluster of rollout workers in this process, whose workers can be killed at any time. Not a test."""

import asyncio
import math

from mtrl.rollout.processes import WorkerLostError
from mtrl.rollout.worker import RolloutWorker


class Process:
    """A worker that can be killed; arguments and results are not copied."""

    def __init__(self, worker):
        self.worker, self.is_dead = worker, False
        self.deaths = set()
        """A future for each call in progress, which is done when the process is killed."""

    async def call(self, method, *args):
        if self.is_dead:
            raise WorkerLostError("it was killed")
        work = asyncio.ensure_future(getattr(self.worker, method)(*args))
        death = asyncio.get_running_loop().create_future()
        self.deaths.add(death)
        try:
            await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
            if self.is_dead:
                raise WorkerLostError("it was killed")
            return work.result()
        finally:
            work.cancel()
            self.deaths.discard(death)

    def kill(self):
        self.is_dead = True
        for future in [*self.deaths, *self.worker._tasks.values()]:
            future.cancel()


class InMemoryCluster:
    """See `mtrl.rollout.workers.Cluster`; `make` makes the loop of each worker."""

    def __init__(self, make, seed=0):
        self.make, self.seed = make, seed
        self.processes, self.killed, self.is_closed = [], 0, False
        self.free_room = math.inf
        """Number of workers for which there is room."""
        self._told = set()

    @property
    def alive(self):
        return [process for process in self.processes if not process.is_dead]

    def spawn(self, index):
        self.processes.append(Process(RolloutWorker(self.make, self.seed)))
        return self.processes[-1]

    async def call(self, process, method, *args):
        return await process.call(method, *args)

    def tell(self, process, method, *args):
        task = asyncio.ensure_future(process.call(method, *args))
        self._told.add(task)
        task.add_done_callback(lambda done: (self._told.discard(done), done.cancelled() or done.exception()))

    async def room(self):
        return self.free_room

    def place(self, process):
        return ""

    def share(self, weights):
        return weights

    def kill(self, process):
        if not process.is_dead:
            self.killed += 1
            process.kill()

    def close(self):
        self.is_closed = True
        for process in self.alive:
            self.kill(process)
