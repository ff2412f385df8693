"""The processes of rollout workers, as actors of Ray. No other module imports Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtrl.errors import UserError, missing_extra
from mtrl.rollout.installation import check_versions
from mtrl.rollout.processes import WorkerLostError
from mtrl.rollout.resources import WorkerResources
from mtrl.rollout.worker import Failure, RolloutWorker
from mtrl.utils.provenance import versions
from mtrl.utils.text import one_line

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a running cluster; `local` or unset: there is none."""
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
    "RAY_prestart_worker_first_driver": "0",  # start processes for the workers only
    "RAY_worker_niceness": "0",  # workers have the priority of this process; Ray lowers it by default
}
"""Environment variables of a cluster that this process starts. Ray reads them when it is imported."""
ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",  # Ray ends this process if its server is lost for so long
}
"""Environment variables of this process, also where it uses a cluster that runs already."""
CHANGED = ("PYTHONPATH", "PYTHONBREAKPOINT")
"""Environment variables that change while Ray starts: the first for its workers, the second by Ray itself."""
SMALLEST_STORE = 80 * 2**20
"""Size of Ray's shared memory beside the weights, in bytes; Ray refuses less than 75 MiB."""


class _Actor(RolloutWorker):
    """A worker that takes weights in the form in which `RayCluster.share` puts them, if its machine has the versions of
    the leader: other versions may sample other tokens, or be unable to read the arguments."""

    def __init__(self, installed: Mapping[str, str], arguments: bytes):
        """
        Args:
            installed: versions of the leader.
            arguments: pickled arguments of `RolloutWorker`.
        """
        self._failure: Failure | None = None
        try:
            check_versions(installed, versions())
            super().__init__(*pickle.loads(arguments))
        except Exception as error:  # such as a module that this machine lacks
            self._failure = Failure.of(error)

    async def start(self) -> Failure | None:
        return self._failure or await super().start()

    async def load(self, weights: Any, version: int) -> Any:
        if weights is not None:
            from mtrl.engines.packed import unpack  # imports torch, which workers without a model do not need

            weights = unpack(weights)
        return await super().load(weights, version)


class RayCluster:
    """See `mtrl.rollout.workers.Cluster`.

    It uses the cluster of `RAY_ADDRESS`, or the one that `ray start` has started on this machine. Without one it starts
    Ray on this machine, reachable from it only, for as long as this process runs. Actors end with this process.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        count: int,
        resources: WorkerResources,
        weight_bytes: int,
    ):
        """
        Args:
            arguments: arguments of every `RolloutWorker`.
            count: number of workers, for which a cluster that is started here has room.
            resources: what Ray reserves for each worker.
            weight_bytes: size of the weights, in bytes.

        Raises:
            UserError: Ray is not installed or cannot be started, or the cluster does not answer or has too little room.
        """
        is_there = _has_cluster()
        for name, value in ALWAYS.items():
            os.environ.setdefault(name, value)
        if not is_there:
            os.environ.update(OWN)
        try:
            import ray
        except ImportError:
            raise missing_extra("ray, which rollouts.workers needs,", "ray") from None
        self._ray = ray
        self._arguments = (versions(), ray.cloudpickle.dumps(arguments))
        self._has_machines = is_there
        """Whether workers may run on other machines than this one."""
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                self._connect(resources.own_cluster(count) | {"object_store_memory": SMALLEST_STORE + 3 * weight_bytes})
            except Exception as error:
                where = "the cluster of Ray cannot be used" if is_there else "Ray cannot be started"
                raise UserError(
                    f"rollouts.workers={count}: {where} ({one_line(error, 400)}); "
                    + (f"start it, or set {ADDRESS}=local" if is_there else "rollouts.workers=0 needs no Ray")
                ) from error
        self._actor = ray.remote(_Actor).options(
            **resources.options(),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            scheduling_strategy="SPREAD",
        )
        self._resources = resources
        self._handles: list[Any] = []
        self._places: dict[Any, str] = {}
        """Name of the machine of each process that has answered."""
        if (room := self._room()) < count:
            self.close()
            raise UserError(
                f"rollouts.workers={count}: each worker reserves {resources}, and Ray has room for {room:g} of them; "
                "set fewer workers, or less in rollouts.cpus, rollouts.gpus or environment.resources"
            )

    def _connect(self, own: Mapping[str, Any]) -> None:
        """Connect this process to the running cluster, or start Ray on this machine with the resources `own`.

        Ray changes a signal handler and environment variables of this process, which are set back.
        """
        handler, before = signal.getsignal(signal.SIGTERM), {name: os.environ.get(name) for name in CHANGED}
        there: dict[str, Any] = {"address": "auto"}
        here = {"address": "local", "include_dashboard": False, **own}
        if not self._has_machines:  # workers import what this process can import, such as a user's module
            os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self._ray.init(log_to_driver=False, configure_logging=False, **(there if self._has_machines else here))
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray's would end the run without saving it
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def spawn(self, index: int) -> Any:
        """See `Cluster`. Ray spreads the processes over the machines that have room."""
        handle = self._actor.remote(*self._arguments)
        self._handles.append(handle)
        return handle

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        try:
            result = await getattr(worker, method).remote(*args)
        except self._ray.exceptions.RayError as error:
            await self._find(worker)
            raise WorkerLostError(self._named(worker, _reason(error))) from error
        await self._find(worker)
        return replace(result, message=self._named(worker, result.message)) if isinstance(result, Failure) else result

    def tell(self, worker: Any, method: str, *args: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            getattr(worker, method).remote(*args)

    def share(self, weights: Any) -> Any:
        from mtrl.engines.packed import pack

        return self._ray.put(pack(weights))

    async def room(self) -> float:
        return await asyncio.to_thread(self._room)

    def _room(self) -> float:
        return self._resources.room(node["Resources"] for node in self._ray.nodes() if node["Alive"])

    def place(self, worker: Any) -> str:
        return self._places.get(worker, "")

    async def _find(self, worker: Any) -> None:
        """Note the machine of a process, where there can be several."""
        if self._has_machines and worker not in self._places:
            self._places[worker] = await asyncio.to_thread(self._machine_of, worker)

    def _machine_of(self, worker: Any) -> str:
        from ray._private.state import actors  # the public interface needs Ray's dashboard

        node_id = actors(worker._actor_id.hex()).get("Address", {}).get("NodeID")
        return next((f"node {_name_of(node)}" for node in self._ray.nodes() if node["NodeID"] == node_id), "")

    def _named(self, worker: Any, message: str) -> str:
        place = self.place(worker)
        return f"{place}: {message}" if place else message

    def kill(self, worker: Any) -> None:
        self._places.pop(worker, None)
        with suppress(Exception):  # it has ended already, or Ray has
            self._ray.kill(worker)
        if worker in self._handles:
            self._handles.remove(worker)

    def close(self) -> None:
        for worker in list(self._handles):
            self.kill(worker)
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()


def _has_cluster() -> bool:
    """Return whether a cluster of Ray runs that this process should use."""
    address = os.environ.get(ADDRESS, "")
    if address:
        return address != "local"
    folder = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
    return (folder / "ray" / "ray_current_cluster").exists()


def _name_of(node: Mapping[str, Any]) -> str:
    """Return the name that a node was given (`ray start --node-name`), else its host's name."""
    given, address = node["NodeName"], node["NodeManagerAddress"]
    return str(node["NodeManagerHostname"] if given in ("", address) else given)


def _reason(error: Exception) -> str:
    """Return Ray's message about a lost actor in one line, without its advice; the error that a method raised, if that
    is the reason; and the last line of the traceback of an actor that could not be made."""
    if (raised := getattr(error, "cause", None)) is not None:
        return one_line(f"{type(raised).__name__}: {raised}", 300)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if getattr(error, "actor_init_failed", False):
        return f"{one_line(lines[-1], 300)}; every machine needs the installation of rank 0"
    cause = next((line for line in lines if "exit type" in line.lower() or "cause" in line.lower()), lines[0])
    return one_line(cause.partition("Some common causes")[0].rstrip(), 300)
