"""A private folder for files that the trainer passes to servers. It is removed at the end of the trainer, or later by
another one."""

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
from mtrl.utils.text import one_line

PREFIX = "mtrl-sync-"
LOCK = "lock"
SHARED_MEMORY = Path("/dev/shm")
ROOM = 3
"""Number of versions that shared memory must have room for to be used, such as the newest one and one that is being
written."""
MIN_AGE = 3600.0
"""Minimum age, in seconds, at which a folder without a lock file counts as abandoned; a younger one may still be under
creation."""


class SyncFolder:
    """A private folder of this process, with a subfolder per name.

    The process holds a lock on a file in the folder, which the system releases when the process ends for any reason.
    The next process that creates such a folder in the same parent finds the lock free and removes the old folder.
    """

    def __init__(self, parent: str | None, key: str):
        """
        Args:
            parent: folder in which it is created; None: shared memory if it has room, else the folder of temporary
                files.
            key: configuration key of `parent`, for errors.
        """
        self._parent = None if parent is None else Path(parent)
        self._key = key
        self._root: Path | None = None
        self._lock: int | None = None
        self._writing = threading.Lock()

    def write(self, name: str, size: int, fill: Callable[[Path], None]) -> Path:
        """Return the folder `name`; create it atomically if it does not exist.

        Args:
            size: approximate number of bytes that `fill` writes.
            fill: function that writes the files to a temporary folder, which is renamed afterwards.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            with self._writing:
                root = self._own_root(size)
                if not (root / name).exists():
                    _fill_atomically(root / name, fill)
                return root / name
        except Exception as error:
            if (problem := _storage_error(error)) is None:
                raise
            raise UserError(
                f"{self._key}={self._parent or 'null'}: {size / 1e9:.3g} GB for the servers could not be written to "
                f"{self._root or self._parent} ({problem}); name a folder with room for {ROOM} times as much"
            ) from error

    def remove(self, name: str) -> None:
        """Remove the folder `name` if it exists. Processes that have a file of it open can still read the file."""
        if self._root is not None and (self._root / name).exists():
            removed = self._root / f".{name}-removed"
            with suppress(OSError):
                (self._root / name).rename(removed)  # no process sees an incomplete folder
                shutil.rmtree(removed, ignore_errors=True)

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
            parent = self._parent or _default_parent(size)
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # only this user can enter it
            new = root / f".{LOCK}"  # gets its final name once it is locked, else others would remove the folder
            self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with suppress(OSError):  # a file system without locks, where other processes get none either
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(root / LOCK)
            self._root = root
        return self._root


def _fill_atomically(folder: Path, fill: Callable[[Path], None]) -> None:
    temporary = folder.with_name(f".{folder.name}")
    temporary.mkdir(mode=0o700)
    try:
        fill(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_abandoned(parent: Path) -> None:
    """Remove the sync folders of this user whose process has ended."""
    for root in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if root.is_symlink() or not root.is_dir() or root.stat().st_uid != os.getuid():
                continue
            if _is_abandoned(root):
                shutil.rmtree(root, ignore_errors=True)


def _is_abandoned(root: Path) -> bool:
    """Whether the process of a sync folder has ended.

    Raises:
        OSError: the state of the lock cannot be determined.
    """
    try:
        lock = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - root.stat().st_mtime > MIN_AGE
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _default_parent(size: int) -> Path:
    with suppress(OSError):
        if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free > ROOM * size:
            return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _storage_error(error: Exception) -> str | None:
    """Return the file system's error text, or None if the error has another cause. safetensors wraps such errors in its
    own error class."""
    if isinstance(error, OSError):
        return "no space left" if error.errno == errno.ENOSPC else one_line(error.strerror or error)
    if type(error).__name__ == "SafetensorError" and "I/O error" in str(error):
        return "no space left" if f"os error {errno.ENOSPC}" in str(error) else one_line(error)
    return None
