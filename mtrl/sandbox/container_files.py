"""The size of the files that a container has written, measured on its host by root.

Files with a name are below the upper folder of the container's root, an overlay. Files without a name, which a process
has removed while it holds them open or in its memory, take up space until they are closed: proc(5) shows them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import re
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtrl.sandbox.bounded_client import run_client

_KCMP = {"x86_64": 312, "aarch64": 272, "riscv64": 272}.get(platform.machine())
"""Number of the system call kcmp(2); None: it is not known for this machine."""
_KCMP_FILES = 2
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class ContainerFiles:
    """The places of the files of one container on this machine."""

    folder: str
    """Folder that holds the changes of the container."""
    devices: frozenset[int]
    """Devices that the files of the container report (`st_dev`): that of the overlay, and that of its folder."""
    cgroup: str
    """Name of the control group that all processes of the container are in or below. A process can leave each namespace
    of its container, and not its control group."""


def may_measure() -> bool:
    """Whether this process may read the files of all containers: only root may, and users of a container could hide
    files from others."""
    return os.geteuid() == 0


def container_files(process: int, container: str) -> ContainerFiles | None:
    """Return where the files of a container are. None if the container runs on another machine, or if its root is not
    an overlay of this machine.

    Args:
        process: number of the first process of the container.
        container: id of the container, a part of the name of its control group, and of no other on this machine.
    """
    place = Path(f"/proc/{process}")
    try:
        cgroup = re.search(rf"[^/\n]*{re.escape(container)}[^/\n]*", (place / "cgroup").read_text(encoding="utf-8"))
        folder = upper_folder((place / "mountinfo").read_text(encoding="utf-8"))
        if cgroup is None or folder is None or not os.path.isdir(folder):
            return None
        devices = frozenset(os.stat(path).st_dev for path in (place / "root", folder))
        return ContainerFiles(folder, devices, cgroup[0])
    except (OSError, ValueError):
        return None


def upper_folder(mounts: str) -> str | None:
    """Return the upper folder of the overlay that is the root; None if there is none, or if its name is escaped.

    Args:
        mounts: text of /proc/PID/mountinfo (proc(5)).
    """
    root = next((line for line in mounts.splitlines() if line.split()[4] == "/" and " overlay " in line), "")
    found = re.search(r"[ ,]upperdir=([^, \\]+)(?=[ ,]|$)", root)
    return found[1] if found else None


def processes_in(cgroup: str) -> list[int]:
    """Return the numbers of the processes of this machine in a control group or below it.

    Args:
        cgroup: name of the control group, without the names of those above it.
    """
    found, part = [], f"/{cgroup}".encode()
    for process in _numbers("/proc"):
        with suppress(OSError):  # the process has ended
            if part in Path(f"/proc/{process}/cgroup").read_bytes():
                found.append(process)
    return found


def files_size(files: ContainerFiles, seconds: float) -> tuple[int | None, int]:
    """Return the number of bytes that the files of a container with a name take up, None if they could not be measured
    in time, and the number of bytes of those without a name that were found in time.

    Args:
        seconds: time limit of the measurement, in seconds.

    Raises:
        OSError: du cannot be run.
    """
    deadline = time.monotonic() + seconds
    unnamed = unnamed_size(processes_in(files.cgroup), files.devices, seconds / 2)
    return folder_size(files.folder, deadline - time.monotonic()), unnamed


def folder_size(folder: str, seconds: float) -> int | None:
    """Return the number of bytes on the disk below a folder, 0 if it is gone, and None if `du` did not measure it in
    time.

    Args:
        seconds: time limit in seconds.

    Raises:
        OSError: du cannot be run.
    """
    command = ["du", "--summarize", "--one-file-system", "--block-size=1", "--", folder]
    try:
        done = run_client(command, seconds)
    except subprocess.TimeoutExpired:
        return None
    size = done.stdout.partition("\t")[0]
    if size.isdecimal():
        return int(size)
    return None if os.path.isdir(folder) else 0


def unnamed_size(processes: Sequence[int], devices: frozenset[int], seconds: float) -> int:
    """Return the number of bytes on the disk of the files without a name that processes hold. Files that were not found
    in time do not count; the order of the processes is another one each time, so that none stays behind the others.

    Args:
        devices: devices of the files that count. Files of others, such as those in memory, do not.
        seconds: time limit in seconds.
    """
    deadline = time.monotonic() + seconds
    sizes: dict[tuple[int, int], int] = {}
    for held in _held(random.SystemRandom().sample(processes, len(processes))):
        if time.monotonic() > deadline:
            break
        with suppress(OSError):  # it was closed meanwhile
            found = held.stat()
            if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and found.st_dev in devices:
                sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _held(processes: Iterable[int]) -> Iterator[os.DirEntry[str]]:
    """Yield the files that processes hold. Most threads share one table of open files, which is read once; a thread may
    have a table of its own. The threads of a process share one memory. A thread that has ended shows neither, which the
    first may have done before the others."""
    readers: list[int] = []
    for process in processes:
        has_memory = False
        for thread in _numbers(f"/proc/{process}/task"):
            if not any(share_open_files(thread, other) for other in readers):
                readers.append(thread)
                yield from entries_of(f"/proc/{process}/task/{thread}/fd")
            if not has_memory:
                for entry in entries_of(f"/proc/{thread}/map_files"):
                    has_memory = True
                    yield entry


def share_open_files(one: int, other: int) -> bool:
    """Whether two threads are known to share their table of open files (kcmp(2), KCMP_FILES)."""
    return _KCMP is not None and _libc.syscall(_KCMP, one, other, _KCMP_FILES, 0, 0) == 0


def _numbers(folder: str) -> list[int]:
    return [int(entry.name) for entry in entries_of(folder) if entry.name.isdigit()]


def entries_of(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder of /proc, until it is gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries
