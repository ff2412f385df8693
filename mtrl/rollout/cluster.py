"""The processes of rollout workers, as actors of Ray. No other module imports Ray."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtrl.errors import UserError, missing_extra
from mtrl.rollout.resources import Resources
from mtrl.rollout.worker import RolloutWorker
from mtrl.rollout.workers import WorkerLostError
from mtrl.utils.text import one_line

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of a running cluster; `local` or unset: there is none."""
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # listen on the loopback interface only
    "RAY_prestart_worker_first_driver": "0",  # start processes for the workers only
    "RAY_worker_niceness": "0",  # workers have the priority of this process; Ray lowers it by default
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",  # Ray ends this process if its server is lost for so long
}
"""Environment variables of a cluster that this process starts. Ray reads them when it is imported."""
CHANGED = ("PYTHONPATH", "PYTHONBREAKPOINT")
"""Environment variables that change while Ray starts: the first for its workers, the second by Ray itself."""
SMALLEST_STORE = 80 * 2**20
"""Size of Ray's shared memory beside the weights, in bytes; Ray refuses less than 75 MiB."""


class _Actor(RolloutWorker):
    """A worker that takes weights in the form in which `RayCluster.share` puts them."""

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
        resources: Resources,
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
        self._arguments = arguments
        is_there = _has_cluster()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not is_there:
            os.environ.update(OWN)
        try:
            import ray
        except ImportError:
            raise missing_extra("ray, which rollouts.workers needs,", "ray") from None
        self._ray = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            own: dict[str, Any] = {
                **resources.own_cluster(count),
                "object_store_memory": SMALLEST_STORE + 3 * weight_bytes,
                "include_dashboard": False,
            }
            handler, before = signal.getsignal(signal.SIGTERM), {name: os.environ.get(name) for name in CHANGED}
            if not is_there:  # workers import what this process can import, such as a user's module
                os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            try:
                ray.init(
                    address="auto" if is_there else "local",
                    log_to_driver=False,
                    configure_logging=False,
                    **({} if is_there else own),
                )
            except Exception as error:
                where = "the cluster of Ray does not answer" if is_there else "Ray cannot be started"
                raise UserError(
                    f"rollouts.workers={count}: {where} ({one_line(error, 400)}); "
                    + (f"start it, or set {ADDRESS}=local" if is_there else "rollouts.workers=0 needs no Ray")
                ) from error
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, handler)  # Ray's would end the run without saving it
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
        self._actor = ray.remote(_Actor).options(
            **resources.options(),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
            scheduling_strategy="SPREAD",
        )
        self._handles: list[Any] = []
        room = resources.room(node["Resources"] for node in ray.nodes() if node["Alive"])
        if room < count:
            self.close()
            raise UserError(
                f"rollouts.workers={count}: each worker reserves {resources}, and Ray has room for {room:g} of them; "
                "set fewer workers, or less in rollouts.cpus, rollouts.gpus or environment.resources"
            )

    def spawn(self, index: int) -> Any:
        handle = self._actor.remote(*self._arguments)
        self._handles.append(handle)
        return handle

    async def call(self, worker: Any, method: str, *args: Any) -> Any:
        try:
            return await getattr(worker, method).remote(*args)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(_reason(error)) from error

    def tell(self, worker: Any, method: str, *args: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            getattr(worker, method).remote(*args)

    def share(self, weights: Any) -> Any:
        from mtrl.engines.packed import pack

        return self._ray.put(pack(weights))

    def kill(self, worker: Any) -> None:
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


def _reason(error: Exception) -> str:
    """Return Ray's message about a lost actor in one line, without its advice; the error that a method raised, if that
    is the reason."""
    if (raised := getattr(error, "cause", None)) is not None:
        return one_line(f"{type(raised).__name__}: {raised}", 300)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "exit type" in line.lower() or "cause" in line.lower()), lines[0])
    return one_line(cause.partition("Some common causes")[0].rstrip(), 300)
