"""Start of torch's manager of shared files (`torch_shm_manager`), which runs as long as any process maps such a file.

Torch would start it with all open descriptors of this process. The manager outlives this process while a server has a
file mapped, so that a reader of our output (`… | tee log`) would wait for the end of the servers.
"""

from __future__ import annotations

import os
import secrets
import select
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

PROGRAM = Path(torch.__file__).parent / "bin" / "torch_shm_manager"
SHARED_MEMORY = Path("/dev/shm")
STARTING = 30.0
"""Timeout for the manager's message with its address, in seconds."""
_SIZE = 8


@lru_cache(maxsize=1)
def start_manager() -> None:
    """Start a manager without descriptors of this process, once, and let torch use it from now on.

    Raises:
        RuntimeError: the manager does not start.
    """
    process = subprocess.Popen(
        [PROGRAM], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        is_there, _, _ = select.select([output], [], [], STARTING)
        address = output.readline().strip() if is_there else b""
    if not address.startswith(b"/"):
        process.kill()
        process.wait()
        raise RuntimeError(f"{PROGRAM} did not start: {address.decode(errors='replace') or 'it printed nothing'}")
    _processes.append(process)
    _register(address)


def _register(address: bytes) -> None:
    """Let torch use the manager at this address, by mapping a file of that manager: torch stores the manager of every
    file that it has mapped, and uses it again."""
    name = f"torch_{os.getpid()}_{secrets.token_hex(8)}"
    with open(SHARED_MEMORY / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.truncate(_SIZE)
    torch.UntypedStorage._new_shared_filename_cpu(address, f"/{name}".encode(), _SIZE)  # freed at once: removed


_processes: list[subprocess.Popen[bytes]] = []
"""Processes that are never waited for, because they end after this process."""
