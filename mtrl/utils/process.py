"""This process: what `torchrun` reports about its launch, its cores and open files, and the settings of its garbage
collector. The module imports no torch."""

from __future__ import annotations

import gc
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtrl.errors import UserError

THRESHOLDS = (10_000, 20, 50)
"""Thresholds for `gc.set_threshold`: the number of allocations minus deallocations that starts a collection of the
youngest generation, then the number of collections of each generation before the next older one is collected. Python's
defaults are 700, 10, 10."""

IMPORT_THRESHOLDS = (50_000, 20, 20)
"""Thresholds of a program that has just started. The imports of torch and Transformers make half a million objects,
none of which is garbage; with Python's thresholds many collections would examine them again."""


def is_launched() -> bool:
    """Return whether this process is one rank of a launch, and not a single process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_follower() -> bool:
    """Return whether this process is a rank other than the leader, rank 0."""
    return is_launched() and environment_integer("RANK") > 0


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


def environment_integer(name: str, default: str = "0") -> int:
    """Return the value of an environment variable that holds a whole number.

    Raises:
        UserError: the value is not a whole number.
    """
    value = os.environ.get(name, default)
    if not value.isdecimal():
        raise UserError(f"the environment has {name}={value}, which is not a whole number; start ranks with torchrun")
    return int(value)


def usable_cores() -> int:
    """Return the number of cores that this process may use: those of its CPU affinity, which SLURM, `taskset` and
    containers restrict; `os.cpu_count()` returns all cores of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_open_files(wanted: int) -> int | None:
    """Raise the soft limit of open files (RLIMIT_NOFILE) to `wanted` if it is lower, at most to the hard limit, which
    only root can raise. Programs that are started later inherit it. Return the soft limit; None if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return None if soft == resource.RLIM_INFINITY else soft


def collect_rarely() -> None:
    """Let garbage collections be rare from the start of a program, before it imports its larger modules."""
    gc.set_threshold(*IMPORT_THRESHOLDS)


def settle() -> None:
    """Let garbage collections skip all objects that exist now, and run less often, until this process ends."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def settled() -> Iterator[None]:
    """Within this context, garbage collections skip all objects that existed at its start, and run less often.

    A full collection examines every object, and torch and transformers create half a million of them, so that each full
    collection would stop the event loop for 0.4 s. If the caller has frozen objects before, all remain frozen, since
    Python cannot thaw only some.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    settle()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def start_time(process: int) -> str:
    """Return the start time of a process, in clock ticks since boot (proc(5)); empty if the system does not give it."""
    with suppress(OSError):
        # The name in brackets may contain any characters, so fields are counted from its end: field 22 is the 20th.
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
    return ""
