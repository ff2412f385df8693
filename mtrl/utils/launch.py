"""Information that `torchrun` gives a process about its launch. The module imports no torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from mtrl.errors import UserError


def is_launched() -> bool:
    """Return whether this process is one rank of a launch, and not a single process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """Return whether this process is a rank other than the leader, rank 0."""
    return is_launched() and number("RANK") > 0


def launch_id() -> str | None:
    """Return an id that is the same for all attempts of one launch (`torchrun --max-restarts`) and different for other
    launches; None without `torchrun`.

    The id of the rendezvous alone is not enough: it is `none` by default, and users reuse their own. So the id also
    contains the host and the process id of the agent, which starts the attempts; and the agent's start time, because
    process ids are reused.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if not is_launched() or run_id is None:
        return None
    agent = os.getppid()
    return f"{run_id}@{socket.gethostname()}:{agent}:{start_time(agent)}"


def number(name: str, default: str = "0") -> int:
    """Return the value of an environment variable that holds a whole number.

    Raises:
        UserError: the value is not a whole number.
    """
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise UserError(f"the environment has {name}={value}, which is no whole number; start ranks with torchrun")
    return int(value)


def start_time(process: int) -> str:
    """Return the start time of a process, in clock ticks since boot (proc(5)); empty if the system does not give it."""
    with suppress(OSError):
        # The name in brackets may contain any characters, so fields are counted from its end: field 22 is the 20th.
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    return ""
