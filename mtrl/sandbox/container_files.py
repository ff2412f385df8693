"""The size of the files that a container has written, measured on its host by root.

Files with a name are below the upper folder of the container's root, an overlay. Files without a name, which a process
has removed while it holds them open or in its memory, take up space until they are closed: proc(5) shows them.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtrl.sandbox.bounded_client import run_client

MEASURE_SECONDS = 10.0
"""Time limit of a measurement of one container, in seconds, for its named and its unnamed files each."""
Namespace = tuple[int, int]
"""Device and inode of a mount namespace, which all processes of one container share."""


@dataclass(frozen=True)
class ContainerFiles:
    """Where the files of one container are on this machine."""

    folder: str
    """Folder that holds the changes of the container."""
    devices: frozenset[int]
    """Devices that the files of the container report (`st_dev`): that of the overlay, and that of its folder."""
    namespace: Namespace


def container_files(process: int, name: str) -> ContainerFiles | None:
    """Return where the files of a container are. None if this process is not root, from which users of the container
    could hide files; if the container runs on another machine; or if its root is not an overlay of this machine.

    Args:
        process: number of the first process of the container.
        name: text among the arguments of that process, which no other process of this machine has.
    """
    place = Path(f"/proc/{process}")
    try:
        if os.geteuid() != 0 or name.encode() not in (place / "cmdline").read_bytes():
            return None
        folder = upper_folder((place / "mountinfo").read_text(encoding="utf-8"))
        if folder is None or not os.path.isdir(folder):
            return None
        devices = frozenset(os.stat(path).st_dev for path in (place / "root", folder))
        return ContainerFiles(folder, devices, _namespace(process))
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


def processes_by_namespace() -> dict[Namespace, list[int]]:
    """Return the numbers of all processes of this machine by their mount namespace."""
    found: defaultdict[Namespace, list[int]] = defaultdict(list)
    for process in _numbers("/proc"):
        with suppress(OSError):  # the process has ended
            found[_namespace(process)].append(process)
    return found


def files_size(files: ContainerFiles, processes: Mapping[Namespace, Iterable[int]]) -> int | None:
    """Return the number of bytes that the files of a container take up, 0 if they are gone, and None if they could not
    be measured in time.

    Args:
        processes: result of `processes_by_namespace`.

    Raises:
        OSError: du cannot be run.
    """
    named = folder_size(files.folder)
    unnamed = unnamed_size(processes.get(files.namespace, ()), files.devices)
    return None if named is None or unnamed is None else named + unnamed


def folder_size(folder: str) -> int | None:
    """Return the number of bytes on the disk below a folder, 0 if it is gone, and None if `du` did not measure it in
    time.

    Raises:
        OSError: du cannot be run.
    """
    command = ["du", "--summarize", "--one-file-system", "--block-size=1", "--", folder]
    try:
        done = run_client(command, MEASURE_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    size = done.stdout.partition("\t")[0]
    if size.isdecimal():
        return int(size)
    return None if os.path.isdir(folder) else 0


def unnamed_size(processes: Iterable[int], devices: frozenset[int]) -> int | None:
    """Return the number of bytes on the disk of the files without a name that processes hold, and None if they hold too
    many to measure in time.

    Args:
        devices: devices of the files that count. Files of others, such as those in memory, do not.
    """
    deadline = time.monotonic() + MEASURE_SECONDS
    sizes: dict[tuple[int, int], int] = {}
    for held in (entry for process in processes for entry in _held(process)):
        if time.monotonic() > deadline:
            return None
        with suppress(OSError):  # it was closed meanwhile
            found = held.stat()
            if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) and found.st_dev in devices:
                sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _held(process: int) -> Iterator[os.DirEntry[str]]:
    """Yield the files that a process holds. Its threads share one memory, and may have open files of their own. A
    thread that has ended shows none, which the first may have done before the others."""
    has_memory = False
    for thread in _numbers(f"/proc/{process}/task"):
        yield from _entries(f"/proc/{thread}/fd")
        if not has_memory:
            for entry in _entries(f"/proc/{thread}/map_files"):
                has_memory = True
                yield entry


def _numbers(folder: str) -> list[int]:
    return [int(entry.name) for entry in _entries(folder) if entry.name.isdigit()]


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder of /proc, until it is gone."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _namespace(process: int) -> Namespace:
    found = os.stat(f"/proc/{process}/ns/mnt")
    return found.st_dev, found.st_ino
