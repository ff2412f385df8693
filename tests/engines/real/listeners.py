"""Finds the addresses at which the processes of a server listen."""

import os
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from mtrl.engines.server.supervisor import below, processes

LISTENS = "0A"
"""TCP_LISTEN as in /proc."""


def listeners(pid: int) -> set[IPv4Address | IPv6Address]:
    """Return the addresses at which a process and its descendants listen for TCP."""
    return {address for each in (pid, *below([pid], processes())) for address in _of_process(Path("/proc", str(each)))}


def _of_process(folder: Path):
    held = set()
    for link in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            held.add(os.readlink(link))
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in held:
                yield _address(fields[1].partition(":")[0])


def _address(text: str) -> IPv4Address | IPv6Address:
    """Parse an address of words of 32 bits, each in the machine's (little-endian) order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(words))
