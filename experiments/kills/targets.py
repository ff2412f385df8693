"""Kinds of kills: the command of the run, the processes that are killed, and whether the run continues by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "-m mtrl.engines.local.worker"
TRAIN = ("-m", "mtrl.main")
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3", *TRAIN)
OVERLAP = "async_config.max_steps_off_policy=1"
KEEP_ALL = "trainer.checkpoint.keep_last=100"
"""Override for runs that continue while their checkpoints are read."""


@dataclass(frozen=True)
class Target:
    """One kind of kill."""

    name: str
    what: str
    """Name in the table."""
    processes: Callable[[int], list[int]]
    """Maps the id of the started process to the processes that may be killed; empty while there are none."""
    command: tuple[str, ...] = TRAIN
    overrides: tuple[str, ...] = ()
    kills_one: bool = False
    """Whether one random process of these is killed. Otherwise all are killed at the same time."""
    goes_on: bool = False
    """Whether the run continues by itself in the same folder. Otherwise it is resumed after each kill."""
    is_exact: bool = True
    """Whether the run must end with the metrics and the weights of an undisturbed run."""

    def start(self, run_dir: Path, overrides: Sequence[str], resume: bool = False) -> subprocess.Popen[bytes]:
        """Start the run. Its output is appended to `run_dir.log`."""
        words = [*overrides, *self.overrides, f"run_dir={run_dir}", *(["resume=latest"] if resume else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with run_dir.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *self.command, *words], env=environment, stdout=log, stderr=subprocess.STDOUT
            )


def itself(pid: int) -> list[int]:
    return [pid]


def family(pid: int) -> list[int]:
    """Return the ids of the process and of its descendants, parents first (proc(5))."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for known in found:
        found += children.get(known, [])
    return found


def ranks(pid: int) -> list[int]:
    return [child for child in family(pid)[1:] if " mtrl.main " in command_of(child)]


def engines(pid: int) -> list[int]:
    return [child for child in family(pid) if ENGINE in command_of(child)]


def command_of(pid: int) -> str:
    """Return the command line of a process, empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def kill(pids: Sequence[int]) -> None:
    """Send SIGKILL to the processes. All are stopped first, so that none reacts to the death of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


TARGETS = (
    Target("process", "a synchronous run", itself),
    Target("rank", "one of two ranks", ranks, RANKS, (KEEP_ALL,), kills_one=True, goes_on=True),
    Target("job", "two ranks and torchrun", family, RANKS),
    Target(
        "engine", "the engine of an overlapping run", engines, TRAIN, (OVERLAP, KEEP_ALL), goes_on=True, is_exact=False
    ),
    Target("overlap", "an overlapping run", itself, TRAIN, (OVERLAP,), is_exact=False),
)
