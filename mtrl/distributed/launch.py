"""What `torchrun` tells a process about its launch. Imports no torch."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from mtrl.errors import UserError


def is_launched() -> bool:
    """Whether this process is one rank of a launch; else it is alone."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """Whether another rank leads."""
    return is_launched() and number("RANK") > 0


def launch_id() -> str | None:
    """The same for every attempt of one launch (`torchrun --max-restarts`), and for no other; None without `torchrun`.

    The id of the rendezvous alone is not enough: it is `none` by default, and people reuse their own. So the host and
    the agent, which is the process that starts the attempts, belong to it; and when the agent was started, because a
    process id comes again.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if not is_launched() or run_id is None:
        return None
    agent = os.getppid()
    return f"{run_id}@{socket.gethostname()}:{agent}:{_started(agent)}"


def number(name: str, default: str = "0") -> int:
    """An environment variable that holds a whole number.

    Raises:
        UserError: it holds something else.
    """
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise UserError(f"the environment has {name}={value}, which is no whole number; start ranks with torchrun")
    return int(value)


def _started(process: int) -> str:
    """When a process was started, in ticks since the machine was; empty where the system does not say (proc(5))."""
    with suppress(OSError):
        # The name in brackets may hold anything, so count from its end: field 22 is the 20th after it.
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    return ""
