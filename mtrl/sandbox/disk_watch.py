"""The size of the files that containers have written: a thread per container program, which stops those above a limit.

Engines limit the size by quotas of the file system, which default installations do not have. Therefore the sizes are
measured: on this machine (`mtrl/sandbox/container_files.py`) if this process may read the files of the container, else,
or if that takes too long, by `ps --size` of the engine. The engine waits for all containers that it is changing, which
took minutes with 200 of them, and does not count files that a process holds open after their removal. Volumes that an
image declares are not counted by either.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mtrl.sandbox.bounded_client import run_client
from mtrl.sandbox.container_files import ContainerFiles, files_size
from mtrl.sandbox.container_supervisor import owner_label

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum number of seconds between two measurements."""
SHARE = 0.2
"""Maximum share of the wall time that measurements take."""
LONGEST_PAUSE = 60.0
"""Maximum number of seconds between two measurements, however long they take."""
ROUND_SECONDS = 30.0
"""Time limit of a measurement of all containers on this machine, in seconds. Each container may take an equal share of
the time that is left, so that one with millions of files does not delay the others."""
ENGINE_SECONDS = 120.0
"""Time limit of a measurement of all containers by the engine, in seconds."""
_SIZE = re.compile(r"(\S+) ([0-9.]+) ?([kMGT]?)B\b")
"""Name of a container and size of its files, such as `name 1.09kB (virtual 7.5MB)`."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class WatchedContainer:
    """A container and its limit."""

    most_bytes: int
    files: ContainerFiles | None
    """Where its files are on this machine; None: it is not known, or they cannot be read."""
    stop: Callable[[], bool]
    """Ends the container and returns whether it is gone. The call may take minutes."""


class DiskWatch:
    """Watches the containers of this process that one container program has started.

    Args:
        program: path of the container program, docker or podman.
    """

    def __init__(self, program: str):
        self._program = program
        self._containers: dict[str, WatchedContainer] = {}
        self._stopping: set[str] = set()
        self._reasons: set[str] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, name: str, container: WatchedContainer) -> None:
        """Call `container.stop` in another thread when the container has written more than its limit, until the
        container is gone.

        Raises:
            RuntimeError: the system permits no other thread; the container is not watched.
        """
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._watch, daemon=True, name="mtrl-disk-watch")
                thread.start()  # it waits for the lock
                self._thread = thread
            self._containers[name] = container

    def discard(self, name: str) -> None:
        """Watch a container no longer, if it was watched."""
        with self._lock:
            self._containers.pop(name, None)

    def _watch(self) -> None:
        """Measure until no container is left."""
        while True:
            with self._lock:
                if not self._containers:
                    self._thread = None
                    return
                watched = {name: each for name, each in self._containers.items() if name not in self._stopping}
            begun = time.monotonic()
            sizes = self._sizes(watched)
            taken = time.monotonic() - begun
            for name, container in watched.items():
                if sizes.get(name, 0) > container.most_bytes:
                    self._begin_stop(name, container)
            time.sleep(min(LONGEST_PAUSE, max(PAUSE, taken / SHARE - taken)))

    def _begin_stop(self, name: str, container: WatchedContainer) -> None:
        """Stop a container in another thread; without one, the next measurement tries again."""
        self._stopping.add(name)
        try:
            threading.Thread(target=self._stop, args=(name, container), daemon=True).start()
        except RuntimeError as error:  # the limit on threads
            self._stopping.discard(name)
            log.warning("the container %s, whose files are too large, is not removed yet: %s", name, error)

    def _stop(self, name: str, container: WatchedContainer) -> None:
        """Stop a container; if it remains, the next measurement finds it again."""
        try:
            if container.stop():
                self.discard(name)
        except Exception:
            log.exception("the container %s, whose files are too large, could not be removed", name)
        finally:
            self._stopping.discard(name)

    def _sizes(self, watched: Mapping[str, WatchedContainer]) -> dict[str, int]:
        """Return the sizes that could be measured, in bytes, by the name of the container. The files with a name that
        this machine cannot measure, or not in time, are measured by the engine."""
        sizes: dict[str, int] = {}
        try:
            by_engine = set(watched)
            local = {name: each.files for name, each in watched.items() if each.files is not None}
            end = time.monotonic() + ROUND_SECONDS
            for place, (name, files) in enumerate(local.items()):
                share = (end - time.monotonic()) / (len(local) - place)
                named, sizes[name] = files_size(files, share)
                if named is not None:
                    sizes[name] += named
                    by_engine.discard(name)
            found = engine_sizes(self._program) if by_engine else {}
            for name in by_engine & found.keys():
                sizes[name] = sizes.get(name, 0) + found[name]
        except Exception as error:  # the next measurement tries again
            self._warn(error)
        return sizes

    def _warn(self, error: Exception) -> None:
        """Warn once of each reason why sizes cannot be measured."""
        printed = (error.stderr or "").strip() if isinstance(error, subprocess.CalledProcessError) else ""
        reason = printed.splitlines()[-1][:300] if printed else str(error)
        if reason not in self._reasons:
            self._reasons.add(reason)
            log.warning("the files of the containers of %s cannot be measured: %s", self._program, reason)


def engine_sizes(program: str) -> dict[str, int]:
    """Return the number of bytes that each running container of this process has written, by name, to three digits.

    Raises:
        OSError, subprocess.SubprocessError: the program failed or took too long.
    """
    command = [program, "ps", "--size", "--filter", f"label={owner_label(program)}", "--format", "{{.Names}} {{.Size}}"]
    done = run_client(command, ENGINE_SECONDS)
    done.check_returncode()
    return parse_sizes(done.stdout)


def parse_sizes(printed: str) -> dict[str, int]:
    """Return the sizes that `engine_sizes` asked for, in bytes; lines of another form are left out."""
    found = (_SIZE.match(line) for line in printed.splitlines())
    return {match[1]: int(float(match[2]) * _UNITS[match[3]]) for match in found if match}


_watches: dict[str, DiskWatch] = {}
watches_lock = threading.Lock()
"""Held while a watch is made or looked up; a forked process has a lock of its own."""


def disk_watch(program: str) -> DiskWatch:
    """Return the watch of this process for a container program."""
    with watches_lock:
        return _watches.setdefault(program, DiskWatch(program))


def _forget() -> None:
    """Leave the watches to the parent, in a process that was forked."""
    global watches_lock
    watches_lock = threading.Lock()
    _watches.clear()


os.register_at_fork(after_in_child=_forget)
