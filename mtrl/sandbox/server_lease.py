"""Leases of servers: at most one episode of this machine uses a server at a time, and it leaves a mark on this machine.

The mark is in the file of the lease, because an agent can change everything that its server answers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import uuid

from mtrl.utils.files import cache_folder

OWNER_BYTES = 32
"""Length of the name in the file of a lease, in bytes. The byte after it is `USED` if the server was used."""
USED, FRESH = b"u", b"-"


class ServerLease:
    """The right to use one server, held by a lock on a file. The kernel releases the lock when this process ends in any
    way. Other machines do not see it."""

    def __init__(self, file: int):
        """Use `lease` instead."""
        self._file = file
        if not os.fstat(file).st_size:
            os.pwrite(file, uuid.uuid4().hex.encode(), 0)
        self.owner = f"{socket.gethostname()}-{os.pread(file, OWNER_BYTES, 0).decode('ascii', 'replace')}"
        """Name of all processes that can hold this lease: two of them never use the server at the same time."""

    @property
    def is_used(self) -> bool:
        """Whether an episode of this machine used the server, and no process of this machine has seen its end."""
        return os.pread(self._file, 1, OWNER_BYTES) == USED

    def mark(self, is_used: bool) -> None:
        """Set `is_used`, for all later leases of the server.

        Raises:
            OSError: the file cannot be written.
        """
        os.pwrite(self._file, USED if is_used else FRESH, OWNER_BYTES)

    def release(self) -> None:
        """Give the server back. A second call has no effect."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def lease(url: str) -> ServerLease | None:
    """Return a lease of the server at an address, or None if another episode holds it.

    Raises:
        OSError: the file of the lock cannot be written.
    """
    folder = cache_folder() / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / hashlib.sha256(url.encode()).hexdigest()[:16], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    try:
        return ServerLease(file)
    except BaseException:
        os.close(file)
        raise
