"""The size of the files that containers have written: a thread per container engine, which stops those above a limit.

Engines limit the size by quotas of the file system, which default installations do not have. Therefore the engine is
asked for the sizes, by `ps --size`. Volumes that an image declares are not counted.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mtrl.sandbox.container_supervisor import owner_label

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum number of seconds between two looks at the sizes."""
SHARE = 0.2
"""Maximum share of the wall time that the looks take."""
CALL_SECONDS = 120.0
"""Time limit of one look, in seconds."""
_SIZE = re.compile(r"(\S+) ([0-9.]+) ?([kMGT]?)B\b")
"""Name of a container and size of its files, such as `name 1.09kB (virtual 7.5MB)`."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class _Watched:
    bytes: int
    stop: Callable[[], None]


class DiskWatch:
    """Watches the containers of this process that one container program has started.

    Args:
        program: path of the container program, docker or podman.
    """

    def __init__(self, program: str):
        self._program = program
        self._containers: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, name: str, most_bytes: int, stop: Callable[[], None]) -> None:
        """Call `stop` once, in another thread, when the container has written more than `most_bytes` bytes."""
        with self._lock:
            self._containers[name] = _Watched(most_bytes, stop)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="mtrl-disk-watch")
                self._thread.start()

    def discard(self, name: str) -> None:
        """Watch a container no longer, if it was watched."""
        with self._lock:
            self._containers.pop(name, None)

    def _watch(self) -> None:
        """Look at the sizes until no container is left."""
        while True:
            begun = time.monotonic()
            try:
                sizes = container_sizes(self._program)
            except (OSError, subprocess.SubprocessError) as error:  # the next look tries again
                log.warning("%s does not tell the size of its containers: %s", self._program, error)
                sizes = {}
            for name, size in sizes.items():
                watched = self._containers.get(name)
                if watched is not None and size > watched.bytes:
                    self.discard(name)
                    watched.stop()
            taken = time.monotonic() - begun
            time.sleep(max(PAUSE, taken / SHARE - taken))
            with self._lock:
                if not self._containers:
                    self._thread = None
                    return


def container_sizes(program: str) -> dict[str, int]:
    """Return the number of bytes that each running container of this process has written, by name, to three digits.

    Raises:
        OSError, subprocess.SubprocessError: the program failed or took too long.
    """
    command = [program, "ps", "--size", "--filter", f"label={owner_label(program)}", "--format", "{{.Names}} {{.Size}}"]
    stdin = subprocess.DEVNULL
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=CALL_SECONDS, check=True)
    return parse_sizes(done.stdout)


def parse_sizes(printed: str) -> dict[str, int]:
    """Return the sizes that `container_sizes` asked for, in bytes; lines of another form are left out."""
    found = (_SIZE.match(line) for line in printed.splitlines())
    return {match[1]: int(float(match[2]) * _UNITS[match[3]]) for match in found if match}


_watches: dict[str, DiskWatch] = {}
_lock = threading.Lock()


def disk_watch(program: str) -> DiskWatch:
    """Return the watch of this process for a container program."""
    with _lock:
        return _watches.setdefault(program, DiskWatch(program))


os.register_at_fork(after_in_child=_watches.clear)
