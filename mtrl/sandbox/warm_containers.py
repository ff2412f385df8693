"""Containers of Podman and Docker that are started before an episode needs them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from mtrl.sandbox.container import CommandResult, ContainerError, ContainerLimits
from mtrl.sandbox.engine_container import EngineContainer

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
    container: EngineContainer
    since: float = field(default_factory=time.monotonic)

    @property
    def is_usable(self) -> bool:
        return time.monotonic() - self.since < LONGEST_WAIT and self.container.is_running()


class WarmContainers:
    """Started containers that wait for episodes, of the kinds that episodes asked for last.

    A container serves one episode, so another one of its kind is started in the background in place of each that is
    taken. Waiting containers end with this process, like all its containers (`container_supervisor`).

    Args:
        count: greatest number of waiting containers, of all kinds together.
    """

    def __init__(self, count: int):
        self.count = count
        self._lock = threading.Lock()
        self._waiting: OrderedDict[ContainerKind, list[_Waiting]] = OrderedDict()
        """Containers by kind, oldest first; the kind that was asked for last is the last one."""
        self._starting: Counter[ContainerKind] = Counter()

    def take(self, kind: ContainerKind) -> EngineContainer | None:
        """Return a running container of the kind that no episode has used; None if none waits."""
        while True:
            with self._lock:
                waiting = self._waiting.get(kind)
                if not waiting:
                    return None
                first = waiting.pop(0)
            if first.is_usable:
                return first.container
            first.container.remove()

    def refill(self, kind: ContainerKind) -> None:
        """Start containers in the background until `count` of this kind wait."""
        with self._lock:
            waiting = self._waiting.setdefault(kind, [])
            self._waiting.move_to_end(kind)
            missing = self.count - len(waiting) - self._starting[kind]
            self._starting[kind] += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._start, args=(kind,), name="warm-container", daemon=True).start()

    def _start(self, kind: ContainerKind) -> None:
        container = kind.make_waiting()
        try:
            container.start()
        except ContainerError as error:  # an episode that needs the container meets the same error, and reports it
            log.warning("no container waits for the next episode: %s", error)
            container.remove()
            with self._lock:
                self._starting[kind] -= 1
            return
        with self._lock:
            self._starting[kind] -= 1
            self._waiting.setdefault(kind, []).append(_Waiting(container))
            surplus = self._surplus()
        for one in surplus:
            one.container.remove()

    def _surplus(self) -> list[_Waiting]:
        """Take the containers above `count` out, first those of the kind that was asked for longest ago."""
        found = []
        while sum(map(len, self._waiting.values())) > self.count:
            kind, waiting = next(iter(self._waiting.items()))
            if waiting:
                found.append(waiting.pop(0))
            else:
                del self._waiting[kind]
        return found


@cache
def warm_containers(count: int) -> WarmContainers:
    """Return the waiting containers of this process, of which there are at most `count`."""
    return WarmContainers(count)


os.register_at_fork(after_in_child=warm_containers.cache_clear)  # the containers belong to the parent


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
