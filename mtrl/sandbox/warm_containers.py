"""Containers of Podman and Docker that are started before an episode needs them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtrl.sandbox.container import CommandResult, ContainerLimits
from mtrl.sandbox.engine_container import EngineContainer
from mtrl.utils.text import one_line

log = logging.getLogger(__name__)

LONGEST_WAIT = 600.0
"""Number of seconds after which a waiting container is removed instead of used. It is started with so much more time,
so that it lasts as long as one that is started for its episode."""


@dataclass(frozen=True)
class ContainerKind:
    """The arguments of `EngineContainer`. Containers of one kind are alike."""

    engine: str
    image: str
    limits: ContainerLimits
    cwd: str | None = None

    def make(self) -> EngineContainer:
        """Return a container that has not been started."""
        return EngineContainer(self.engine, self.image, self.limits, self.cwd)

    def make_waiting(self) -> EngineContainer:
        """Return a container that has not been started and may wait for its episode."""
        limits = replace(self.limits, seconds=self.limits.seconds + LONGEST_WAIT)
        return EngineContainer(self.engine, self.image, limits, self.cwd)


@dataclass(frozen=True)
class _Waiting:
    kind: ContainerKind
    container: EngineContainer
    since: float = field(default_factory=time.monotonic)

    @property
    def is_usable(self) -> bool:
        try:
            return time.monotonic() - self.since < LONGEST_WAIT and self.container.is_running()
        except OSError:  # no client of the engine can be started
            return False


class WarmContainers:
    """Started containers that wait for episodes, of the kind that an episode asked for last.

    A container serves one episode, so another one is started in the background in place of each that is taken. Waiting
    containers end with this process, like all its containers (`container_supervisor`).

    Args:
        count: greatest number of containers that wait or are being started, of all kinds together. While containers of
            a new kind are started, those of the old one may wait too.
    """

    def __init__(self, count: int):
        self.count = count
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        """Containers in the order of their starts."""
        self._starting = 0
        """Number of containers that are being started."""
        self._newest: ContainerKind | None = None
        """Kind that was asked for last."""

    def take(self, kind: ContainerKind) -> EngineContainer | None:
        """Return a running container of the kind that no episode has used; None if none waits."""
        while (first := self._first(kind)) is not None:
            if first.is_usable:
                return first.container
            _in_background(first.container.remove)
        return None

    def refill(self, kind: ContainerKind) -> None:
        """Start containers of this kind in the background until `count` wait or are being started."""
        with self._lock:
            self._newest = kind
            missing = self.count - sum(one.kind == kind for one in self._waiting) - self._starting
            self._starting += max(0, missing)
        for _ in range(missing):
            if not _in_background(self._start):
                with self._lock:
                    self._starting -= 1

    def _first(self, kind: ContainerKind) -> _Waiting | None:
        with self._lock:
            first = next((one for one in self._waiting if one.kind == kind), None)
            if first is not None:
                self._waiting.remove(first)
            return first

    def _start(self) -> None:
        try:
            with self._lock:
                kind = self._newest
            assert kind is not None
            started = _Waiting(kind, _started(kind))
            with self._lock:
                self._waiting.append(started)
        except Exception as error:  # an episode that needs the container meets the same error, and reports it
            log.warning("no container waits for the next episode: %s", one_line(error))
        finally:
            with self._lock:
                self._starting -= 1
        while (surplus := self._surplus()) is not None:
            surplus.container.remove()

    def _surplus(self) -> _Waiting | None:
        """Take a container out if more than `count` wait: the first one of an old kind, else the first one."""
        with self._lock:
            if len(self._waiting) <= self.count:
                return None
            old = next((one for one in self._waiting if one.kind != self._newest), self._waiting[0])
            self._waiting.remove(old)
            return old


def _started(kind: ContainerKind) -> EngineContainer:
    container = kind.make_waiting()
    try:
        container.start()
    except BaseException:
        with suppress(OSError):  # the supervisor removes it
            container.remove()
        raise
    return container


def _in_background(work: Callable[[], None]) -> bool:
    """Call a function in a thread that does not outlive this process. Return whether the thread has started."""
    try:
        threading.Thread(target=work, name="warm-container", daemon=True).start()
    except RuntimeError as error:  # the limit on threads
        log.warning("no container waits for the next episode: %s", error)
        return False
    return True


_pools_lock = threading.Lock()
_pools: dict[int, WarmContainers] = {}
"""Waiting containers of this process by their greatest number."""


def warm_containers(count: int) -> WarmContainers:
    """Return the waiting containers of this process, of which there are at most `count`."""
    with _pools_lock:
        return _pools.setdefault(count, WarmContainers(count))


def _forget() -> None:
    """Leave the containers to the parent, in a process that was forked."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)


class WarmContainer:
    """A `Container` whose start takes a waiting one if there is one."""

    def __init__(self, kind: ContainerKind, others: WarmContainers):
        self._kind, self._others = kind, others
        self._container: EngineContainer | None = None

    def start(self) -> None:
        """See `Container.start`."""
        self._container = self._others.take(self._kind)
        if self._container is None:
            self._container = self._kind.make()
            self._container.start()
        self._others.refill(self._kind)

    def run(self, command: str, seconds: float, env: Mapping[str, str] | None = None) -> CommandResult:
        """See `Container.run`."""
        return self._started.run(command, seconds, env)

    def copy_in(self, source: Path, target: str) -> None:
        """See `Container.copy_in`."""
        self._started.copy_in(source, target)

    def remove(self) -> None:
        """See `Container.remove`."""
        if self._container is not None:
            self._container.remove()

    @property
    def _started(self) -> EngineContainer:
        assert self._container is not None, "start the container first"
        return self._container
