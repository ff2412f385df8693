"""All servers of an engine: their common start, their supervision, and the updates of their weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mtrl.engines.base import EngineLostError
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.lora_sync import AdapterSync
from mtrl.engines.server.replica import ExternalReplica, ManagedReplica, Replica
from mtrl.engines.server.router import Router
from mtrl.engines.server.server_api import ServerApi, ServerError
from mtrl.engines.server.sync import Weights, WeightSync
from mtrl.engines.server.update import DRAINING, AdapterUpdate, ServerUpdate, failures
from mtrl.engines.server.view import ReplicaView
from mtrl.errors import UserError
from mtrl.utils.text import duration

log = logging.getLogger(__name__)


class ServerGroup:
    """The replicas, with one task per replica that restarts it when it is lost.

    Turns go only to replicas that have the newest weights: `Weights` are compared by identity. A replica that fails to
    load new weights gets no more turns. If this process started it, it is restarted and loads them; otherwise the run
    ends.
    """

    def __init__(
        self,
        backend: ServerBackend,
        sync: WeightSync,
        replicas: Sequence[Replica],
        mode: str,
        limit: int,
        on_failure: Callable[[Exception], None],
    ):
        """
        Args:
            mode: pause mode of updates, one of the server's pause modes.
            limit: maximum number of turns in flight per replica.
            on_failure: function that receives the error after which no more turns are sampled.
        """
        self.backend, self.sync, self.replicas = backend, sync, replicas
        has_adapters = isinstance(sync, AdapterSync)
        self._update = AdapterUpdate if has_adapters else ServerUpdate
        self._mode = mode
        self.drains = mode in DRAINING and not has_adapters
        """Whether new weights wait for the ends of the turns in flight."""
        self.router = Router([replica.load for replica in replicas], limit)
        self.version = 0
        """Policy version of the newest weights."""
        self.updates = 0
        """Number of changes of weights so far. No turn is sent during a change."""
        self.restarts, self.sync_seconds = 0, 0.0
        self._on_failure = on_failure
        self.on_restart: Callable[[], None] = lambda: None
        """Function that is called when a restarted replica accepts turns."""
        self._newest: Weights | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._asleep = False
        """Whether the servers sleep, so that the trainer can use their memory."""
        self._empty = False
        """Whether the servers have slept and received no weights since."""

    @property
    def serving(self) -> list[Replica]:
        return [self.replicas[i] for i in self.router.serving]

    def views(self) -> tuple[ReplicaView, ...]:
        """Return what another process must know to send turns to the replicas, which have all started once."""
        return tuple(
            ReplicaView(
                one.name, one.api.url, one.token, tuple(one.versions), self._is_current(one), one.adapters.newest
            )
            for one in self.replicas
        )

    def keep_adapters(self) -> ExitStack:
        """Keep the newest adapter of every replica loaded until the returned stack is closed, since other processes
        use it."""
        kept = ExitStack()
        for replica in self.replicas:
            kept.enter_context(replica.adapters.sampling(replica.api))
        return kept

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas in parallel.

        Raises:
            UserError: a replica does not start, or the replicas have different versions of weights.
        """
        begun = _now()

        async def start(replica: Replica) -> None:
            try:
                await replica.start()
            except (ServerError, OSError) as error:
                raise UserError(f"{replica.name} cannot be used: it {error}; {replica.advice}") from error
            log.info("%s is ready after %s", replica.name, duration(_now() - begun))

        try:
            async with asyncio.TaskGroup() as starts:
                for replica in self.replicas:
                    starts.create_task(start(replica))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        versions = {replica.name: replica.versions[-1] for replica in self.replicas}
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{name} has {version}" for name, version in versions.items())
            raise UserError(
                f"generator.{self.backend.name}.urls names servers with weights of different versions ({listed}); "
                "restart them"
            )
        for replica in self.replicas:
            replica.load.serving, self.version = True, replica.versions[-1]
            await replica.api.close()  # its connections belong to this event loop

    def kill(self) -> None:
        """End all replicas that this process started, immediately."""
        for replica in self.replicas:
            replica.kill()

    def attach(self) -> None:
        """Use the running event loop from now on."""
        self.router.restart()
        self._updating, self._awake, self._changed = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        if self._empty:
            self.router.pause()
        if not self._asleep:
            self._awake.set()
        for replica in self.replicas:
            replica.attach()
        self._watchers = [asyncio.get_running_loop().create_task(self._supervise(replica)) for replica in self.replicas]

    def fail(self, error: Exception) -> None:
        """Stop the router and the supervision: waiting and further turns raise `error`."""
        self.router.fail(error)
        for task in self._watchers:
            if not task.get_loop().is_closed():
                task.cancel()
        if self._watchers:
            self._changed.set()

    async def close(self) -> None:
        """End all replicas, even in the middle of their work; those at given URLs keep running. Call `fail` first."""
        loop = asyncio.get_running_loop()
        watchers = [task for task in self._watchers if task.get_loop() is loop]
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(replica.end() for replica in self.replicas), return_exceptions=True)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def load(self, weights: Weights) -> None:
        """Send these weights to all servers, and return when at least one samples under them. Concurrent calls run one
        after another.

        Raises:
            UserError: no server will sample under them.
        """
        async with self._updating:
            assert not self._asleep, "the servers sleep; wake them first"
            begun = _now()
            with self._ending_without_weights():
                await self.sync.prepare(weights.tensors, weights.version)
            self._newest = weights
            self.router.pause()
            try:
                await asyncio.sleep(0)  # turns that have a slot already send their requests with the older salt
                self.updates += 1
                if self.drains:
                    await self._drain()
                await self._send_weights([replica for replica in self.replicas if replica.is_up])
                self.version = weights.version
                if self._empty:
                    self._empty = False
                    self.router.resume()
            finally:
                self.sync_seconds += _now() - begun
                self.router.resume()
        await self.until_serving()

    async def until_serving(self) -> None:
        """Wait until at least one replica accepts turns.

        Raises:
            UserError: the engine has failed, so that no replica will.
        """
        while not self.router.serving:
            if self.router.error is not None:
                raise self.router.error
            self._changed.clear()
            await self._changed.wait()

    async def _send_weights(self, replicas: list[Replica]) -> None:
        """Send the newest weights to these replicas, and give up those that do not load them."""
        assert self._newest is not None
        update = self._update(self.backend, self.sync, self._mode, replicas, self._newest)
        try:
            with self._ending_without_weights():
                await update.run()
        except asyncio.CancelledError:  # the event loop ends, and it is unknown which weights the replicas have
            for replica in replicas:
                replica.give_up("was interrupted while it loaded weights")
            raise
        self._give_up(update.failed)
        for replica in replicas:
            self._admit(replica)

    @contextmanager
    def _ending_without_weights(self) -> Iterator[None]:
        """End the use of the engine if an error within this context prevents the sending of weights."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("weights cannot be sent")
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            lost = EngineLostError(f"weights cannot be sent: {reason}")
            self._on_failure(lost)
            raise lost from error

    def _give_up(self, failed: dict[Replica, str]) -> None:
        """Give up failed replicas, so that they are restarted.

        Raises:
            EngineLostError: one of them cannot be restarted.
        """
        for replica, reason in failed.items():
            log.warning("%s %s", replica.name, reason)
            replica.give_up(reason)
        for replica, reason in failed.items():
            if not replica.is_restartable:
                error = EngineLostError(
                    f"{replica.name} {reason}; restart all of generator.{self.backend.name}.urls, then continue with "
                    "resume=latest"
                )
                self._on_failure(error)
                raise error

    def _admit(self, replica: Replica) -> None:
        """Let a replica accept turns, if it is up and has the newest weights."""
        if self._is_current(replica):
            replica.load.serving = True
            self._changed.set()
            self.router.dispatch()

    def _is_current(self, replica: Replica) -> bool:
        """Whether a replica runs with the newest weights."""
        return replica.is_up and replica.weights is self._newest

    async def _drain(self) -> None:
        """Wait for the turns in flight, up to the time limit."""
        seconds = self.backend.settings.request_timeout + self.backend.settings.sync_timeout
        try:
            async with asyncio.timeout(seconds):
                await self.router.idle()
        except TimeoutError:
            log.warning("turns have not ended after %g s; the update continues without waiting for them", seconds)

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Make all servers free their memory; new turns wait until `wake` and new weights."""
        async with self._updating:
            assert not self._asleep, "the servers sleep already"
            if not self._empty:
                self.router.pause()
            self._asleep = self._empty = True
            self._awake.clear()
            await self._end_starting()
            await self._drain()
            await self._all("going to sleep", lambda server: server.sleep())

    async def _end_starting(self) -> None:
        """End the replicas that are still starting, because they would take the memory that is to be freed. They are
        restarted after `wake`."""
        starting = [replica for replica in self.replicas if not replica.is_up]
        for replica in starting:
            replica.failures -= 1
            replica.give_up("was starting when the trainer needed its memory")
        await asyncio.gather(*(replica.end() for replica in starting))

    async def wake(self) -> None:
        """Make all servers allocate their memory again."""
        async with self._updating:
            await self._all("waking", lambda server: server.wake())
            self._asleep = False
            self._awake.set()

    async def _all(self, name: str, step: Callable[[ServerApi], Awaitable[None]]) -> None:
        replicas = [replica for replica in self.replicas if replica.is_up]
        self._give_up(await failures(replicas, name, step, self.backend.settings.sync_timeout))

    # -- supervision -------------------------------------------------------------------------------------------------

    async def _supervise(self, replica: Replica) -> None:
        """Supervise a replica: restart it whenever it is lost."""
        try:
            while True:
                if not replica.is_up:
                    await self._restart(replica)
                replica.give_up(await replica.until_lost(lambda answered: self._on_health_check(replica, answered)))
                self._changed.set()
        except UserError as error:
            self._on_failure(error if isinstance(error, EngineLostError) else EngineLostError(str(error)))
        except Exception as error:  # waiting callers must get the error
            log.exception("%s is not supervised any more", replica.name)
            self._on_failure(EngineLostError(f"{replica.name} is lost: {type(error).__name__}: {error}"))

    def _on_health_check(self, replica: Replica, answered: bool) -> None:
        if not answered:
            replica.load.serving = False
        elif not replica.load.serving:
            self._admit(replica)

    async def _restart(self, replica: Replica) -> None:
        """Restart a replica until it has the newest weights.

        Raises:
            EngineLostError: the replica was lost too often.
        """
        while not replica.is_up:
            reason, restarts = replica.failure or "has ended", self.backend.settings.restarts
            replica.failures += 1
            if replica.failures > restarts:
                raise EngineLostError(
                    f"{replica.name} {reason}; it was restarted generator.{self.backend.name}.restarts={restarts} "
                    f"times without a turn in between; {replica.advice}"
                )
            log.warning("%s %s; it is restarted", replica.name, reason)
            self.restarts += 1
            await replica.end()
            await self._awake.wait()  # while the servers sleep, a restart would use the trainer's memory
            async with self._updating:
                pass  # no restart during an update; later updates leave out servers that still start
            await self._start_again(replica)

    async def _start_again(self, replica: Replica) -> None:
        try:
            await replica.start()
        except (ServerError, OSError) as error:
            if not replica.is_restartable:
                raise EngineLostError(f"{replica.name} was lost, and it {error}; {replica.advice}") from error
            replica.give_up(str(error))
            return
        async with self._updating:
            if self._asleep:
                replica.failures -= 1
                replica.give_up("restarted while the trainer used its memory")
            elif self._newest is not None and replica.weights is not self._newest:
                await self._send_weights([replica])
            elif replica.versions[-1] != self.version:
                raise EngineLostError(
                    f"{replica.name} restarted with weights of version {replica.versions[-1]} instead of "
                    f"{self.version}; start it with the weights of that version"
                )
            self._admit(replica)
        self.on_restart()


def make_replicas(backend: ServerBackend, log_folder: Path, devices: Sequence[int] | None) -> list[Replica]:
    """Make the replicas at the given URLs, or else the replicas that this process starts.

    Args:
        devices: indices of the GPUs of all replicas, in order.
    """
    settings = backend.settings
    if settings.urls:
        return [ExternalReplica(backend, url) for url in settings.urls]
    each = settings.tensor_parallel_size

    def place(i: int) -> Sequence[int] | None:
        return None if devices is None else list(devices[i * each : (i + 1) * each])

    return [
        ManagedReplica(backend, i, log_folder / f"{backend.name}_{i}.log", place(i)) for i in range(settings.replicas)
    ]


def pause_mode(backend: ServerBackend, in_flight: str) -> str:
    """Return the pause mode of updates.

    Raises:
        UserError: the engine has no such mode.
    """
    modes = backend.make_api("http://127.0.0.1", None).pause_modes
    mode = backend.settings.pause_mode or in_flight
    if mode not in modes:
        raise UserError(
            f"generator.{backend.name}.pause_mode={mode} does not exist; choose one of {', '.join(sorted(modes))}"
        )
    return mode


def _now() -> float:
    return asyncio.get_running_loop().time()
