"""A cluster of rollout workers in this process, whose workers can be killed at any time. Not a test."""

import asyncio
import math

from mtrl.rollout.processes import WorkerLostError
from mtrl.rollout.worker import RolloutWorker


class Process:
    """A worker that can be killed; arguments and results are not copied."""

    def __init__(self, make, seed):
        self.make, self.worker, self.is_dead = make, RolloutWorker(self.make_loop, seed), False
        self.loop = self.events = None
        """The loop of the worker's episodes after its start, and the event loop."""
        self.requested = []
        """Numbers of the requested groups."""
        self.deaths = {}
        """A future for each call in progress, which is done when the process is killed, and the method."""

    def make_loop(self):
        self.loop = self.make()
        return self.loop

    @property
    def is_starting(self):
        """Whether it has not started yet, or loads weights."""
        return self.loop is None or not {"start", "load"}.isdisjoint(self.deaths.values())

    async def call(self, method, *args):
        if self.is_dead:
            raise WorkerLostError("it was killed")
        if method == "play":
            self.requested += [request.number for request in args[0]]
        work = asyncio.ensure_future(getattr(self.worker, method)(*args))
        self.events = asyncio.get_running_loop()
        death = self.events.create_future()
        self.deaths[death] = method
        try:
            await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
            if self.is_dead:
                raise WorkerLostError("it was killed")
            return work.result()
        finally:
            work.cancel()
            del self.deaths[death]

    def kill(self):
        self.is_dead = True
        for death in self.deaths:
            death.cancel()
        if self.events is not None:
            asyncio.run_coroutine_threadsafe(self.worker.abort(self.requested), self.events)


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
        self.processes.append(Process(self.make, self.seed))
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
