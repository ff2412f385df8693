"""A private folder for what trainer and servers hand over in files; it does not outlive the trainer for long."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mtrl.errors import UserError
from mtrl.tracking.text import one_line

PREFIX = "mtrl-sync-"
LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")
ROOM = 3
"""Shared memory is taken where it has room for so many versions: one that is being written beside the newest."""
YOUNG = 3600.0
"""Seconds for which a folder without a lock may be one that is just being made."""


class SyncFolder:
    """Folders by name in a folder of this process.

    The process holds a lock on a file in it, which the system frees however the process ends; the next one that makes
    such a folder at the same place finds the lock free and removes what was left.
    """

    def __init__(self, parent: str | None, key: str):
        """
        Args:
            parent: where it is made; None: shared memory where there is room, else where temporary files go.
            key: of the setting that says where, for errors.
        """
        self._parent = None if parent is None else Path(parent)
        self._key = key
        self._root: Path | None = None
        self._lock: int | None = None
        self._writing = threading.Lock()

    def write(self, name: str, size: int, fill: Callable[[Path], None]) -> Path:
        """A folder `name`, as it is if it is there, else all of it or nothing: `fill` writes beside it.

        Args:
            size: bytes that will be written, roughly.

        Raises:
            UserError: it cannot be written.
        """
        try:
            with self._writing:
                root = self._own_root(size)
                if not (root / name).exists():
                    _fill_beside(root / name, fill)
                return root / name
        except Exception as error:
            if (said := _of_storage(error)) is None:
                raise
            raise UserError(
                f"{self._key}={self._parent or 'null'}: {size / 1e9:.3g} GB for the servers could not be written to "
                f"{self._root or self._parent} ({said}); name a folder with room for {ROOM} times as much"
            ) from error

    def remove(self, name: str) -> None:
        """Remove that folder if it is there; who has a file in it open may read on."""
        if self._root is not None and (self._root / name).exists():
            gone = self._root / f".{name}-gone"
            with suppress(OSError):
                (self._root / name).rename(gone)  # so that nobody finds half of it
                shutil.rmtree(gone, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        root, self._root = self._root, None
        lock, self._lock = self._lock, None
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
        if lock is not None:
            os.close(lock)

    def _own_root(self, size: int) -> Path:
        if self._root is None:
            parent = self._parent or _place(size)
            parent.mkdir(parents=True, exist_ok=True)
            remove_left(parent)
            root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # which only this user can enter
            new = root / f".{LOCK}"  # by its name it is found when we hold it, else others took it for left
            self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks: then nobody else gets one either
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(root / LOCK)
            self._root = root
        return self._root


def _fill_beside(folder: Path, fill: Callable[[Path], None]) -> None:
    beside = folder.with_name(f".{folder.name}")
    beside.mkdir(mode=0o700)
    try:
        fill(beside)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove_left(parent: Path) -> None:
    """Remove such folders of this user whose process has ended."""
    for root in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if root.is_symlink() or not root.is_dir() or root.stat().st_uid != os.getuid():
                continue
            if _is_left(root):
                shutil.rmtree(root, ignore_errors=True)


def _is_left(root: Path) -> bool:
    """
    Raises:
        OSError: there is no telling.
    """
    try:
        lock = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - root.stat().st_mtime > YOUNG
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _place(size: int) -> Path:
    with suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > ROOM * size:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _of_storage(error: Exception) -> str | None:
    """What a file system said, also through safetensors, which has an error of its own."""
    if isinstance(error, OSError):
        return "no space left" if error.errno == errno.ENOSPC else one_line(error.strerror or error)
    if type(error).__name__ == "SafetensorError" and "I/O error" in str(error):
        return "no space left" if f"os error {errno.ENOSPC}" in str(error) else one_line(error)
    return None
