"""The processes in which rollout workers run, as the leader sees them."""

from __future__ import annotations

from typing import Any, Protocol


class WorkerLostError(RuntimeError):
    """The process of a worker has ended, or does not answer."""


class WorkerSilentError(WorkerLostError):
    """A worker does not answer within the time limit; another process would probably not do so either."""


class Cluster(Protocol):
    """The processes in which workers run. `mtrl/rollout/cluster.py` implements it with Ray."""

    def spawn(self, index: int) -> Any:
        """Start the process of worker `index`, and return its handle at once."""

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        """Call a method of `RolloutWorker` and return its result.

        Raises:
            WorkerLostError: the process has ended.
        """

    def tell(self, worker: Any, method: str, *args: Any) -> None:
        """Call a method without waiting for it. A lost process is no error here; an argument that cannot be sent is."""

    def share(self, weights: Any) -> Any:
        """Copy weights to where all workers can read them, and return a reference, which `load` takes."""

    async def room(self) -> float:
        """Return the number of workers for which the machines of the cluster have room, those that run included."""

    def place(self, worker: Any) -> str:
        """Return the name of the machine of a process, for messages; empty if there is one machine, or it is not known
        yet."""

    def kill(self, worker: Any) -> None:
        """End the process at once."""

    def close(self) -> None:
        """End all processes, and whatever the cluster has started for them."""
