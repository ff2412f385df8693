"""The size of the files that containers have written: a thread per container program, which stops those above a limit.

Engines limit the size by quotas of the file system, which default installations do not have. Therefore the sizes are
measured: by `du` in the folder that holds the changes of a container, if this process may read it, else by `ps --size`
of the engine. The latter waits for all containers that the engine is changing, which took minutes with 200 of them.
Volumes that an image declares are not counted.
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
from pathlib import Path

from mtrl.sandbox.container_supervisor import owner_label

log = logging.getLogger(__name__)

PAUSE = 1.0
"""Minimum number of seconds between two measurements."""
SHARE = 0.2
"""Maximum share of the wall time that measurements take."""
CALL_SECONDS = 120.0
"""Time limit of one measurement, in seconds."""
_SIZE = re.compile(r"(\S+) ([0-9.]+) ?([kMGT]?)B\b")
"""Name of a container and size of its files, such as `name 1.09kB (virtual 7.5MB)`."""
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class WatchedContainer:
    """A container and its limit."""

    most_bytes: int
    folder: str | None
    """Folder of the host that holds the changes of the container; None: it is not known, or cannot be read."""
    stop: Callable[[], None]


class DiskWatch:
    """Watches the containers of this process that one container program has started.

    Args:
        program: path of the container program, docker or podman.
    """

    def __init__(self, program: str):
        self._program = program
        self._containers: dict[str, WatchedContainer] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, name: str, container: WatchedContainer) -> None:
        """Call `container.stop` once, in another thread, when the container has written more than its limit."""
        with self._lock:
            self._containers[name] = container
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True, name="mtrl-disk-watch")
                self._thread.start()

    def discard(self, name: str) -> None:
        """Watch a container no longer, if it was watched."""
        with self._lock:
            self._containers.pop(name, None)

    def _watch(self) -> None:
        """Measure until no container is left."""
        while True:
            begun = time.monotonic()
            with self._lock:
                watched = dict(self._containers)
            for name, size in self._sizes(watched).items():
                if name in watched and size > watched[name].most_bytes:
                    self.discard(name)
                    watched[name].stop()
            taken = time.monotonic() - begun
            time.sleep(max(PAUSE, taken / SHARE - taken))
            with self._lock:
                if not self._containers:
                    self._thread = None
                    return

    def _sizes(self, watched: Mapping[str, WatchedContainer]) -> dict[str, int]:
        folders = {name: container.folder for name, container in watched.items() if container.folder is not None}
        try:
            sizes = folder_sizes(folders) if folders else {}
            return sizes | (engine_sizes(self._program) if len(folders) < len(watched) else {})
        except (OSError, subprocess.SubprocessError) as error:  # the next measurement tries again
            log.warning("the files of the containers of %s cannot be measured: %s", self._program, error)
            return {}


def folder_sizes(folders: Mapping[str, str]) -> dict[str, int]:
    """Return the number of bytes on the disk below each folder, by its key; a folder that is gone is left out.

    Raises:
        OSError, subprocess.SubprocessError: du cannot be run or took too long.
    """
    command = ["du", "--summarize", "--one-file-system", "--block-size=1", "--null", "--", *folders.values()]
    stdin = subprocess.DEVNULL
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, errors="replace", timeout=CALL_SECONDS)
    rows = (row.partition("\t") for row in done.stdout.split("\0") if row)
    sizes = {folder: int(size) for size, _, folder in rows}
    return {name: sizes[folder] for name, folder in folders.items() if folder in sizes}


def engine_sizes(program: str) -> dict[str, int]:
    """Return the number of bytes that each running container of this process has written, by name, to three digits.

    Raises:
        OSError, subprocess.SubprocessError: the program failed or took too long.
    """
    command = [program, "ps", "--size", "--filter", f"label={owner_label(program)}", "--format", "{{.Names}} {{.Size}}"]
    stdin = subprocess.DEVNULL
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=CALL_SECONDS, check=True)
    return parse_sizes(done.stdout)


def parse_sizes(printed: str) -> dict[str, int]:
    """Return the sizes that `engine_sizes` asked for, in bytes; lines of another form are left out."""
    found = (_SIZE.match(line) for line in printed.splitlines())
    return {match[1]: int(float(match[2]) * _UNITS[match[3]]) for match in found if match}


def changes_folder(pid_file: Path) -> str | None:
    """Return the folder of the host that holds the changes of a container: the upper folder of its root, an overlay.
    None if it is not known, or if users of the container can hide files in it from this process.

    Args:
        pid_file: file with the number of the container's first process.
    """
    if os.geteuid() != 0:
        return None
    try:
        mounts = Path(f"/proc/{int(pid_file.read_text())}/mountinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    root = next((line for line in mounts if line.split()[4] == "/" and " overlay " in line), "")
    found = re.search(r"[ ,]upperdir=([^, \\]+)", root)
    return found[1] if found and os.path.isdir(found[1]) else None


_watches: dict[str, DiskWatch] = {}
_lock = threading.Lock()


def disk_watch(program: str) -> DiskWatch:
    """Return the watch of this process for a container program."""
    with _lock:
        return _watches.setdefault(program, DiskWatch(program))


os.register_at_fork(after_in_child=_watches.clear)
