"""What the machine does during a drill: containers, memory and CPU time, looked at every few seconds."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAUSE = 2.0
"""Seconds between two looks."""
ENGINE = ("podman", "conmon", "runc", "crun", "docker", "dockerd", "containerd", "containerd-shim")
"""Names of the processes of the container engines, to the 15 characters that the kernel stores."""


class Watch:
    """Records the most containers and the most memory of the engine's processes, in a thread.

    Args:
        count: function that returns the current number of containers.
    """

    def __init__(self, count: Callable[[], int]):
        self._count = count
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._busy = busy_seconds()
        self.most_containers = 0
        self.most_memory = 0
        """Largest proportional set size of all processes of the engine on this machine, in bytes."""
        self.failures = 0
        """Number of looks that failed, so that the largest values may be too low."""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def busy_seconds(self) -> float:
        """Return the time since the start that all processors together were busy with any process, in seconds."""
        return busy_seconds() - self._busy

    def _look(self) -> None:
        while not self._over.wait(PAUSE):
            try:
                self.most_containers = max(self.most_containers, self._count())
                self.most_memory = max(self.most_memory, engine_memory())
            except (OSError, ValueError, subprocess.SubprocessError):
                self.failures += 1


def engine_memory() -> int:
    """Return the proportional set size of all processes of the container engine on this machine, in bytes: memory that
    several processes share counts once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            if (process / "comm").read_text(encoding="utf-8").strip() in ENGINE:
                lines = (process / "smaps_rollup").read_text(encoding="utf-8").splitlines()
                total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def busy_seconds() -> float:
    """Return the time that all processors were busy since the start of the machine, in seconds."""
    ticks = list(map(int, Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]))
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
