"""Rank groups of real processes. A test passes the program of the leader, and gets the exit of every rank."""

import json
import os
import signal
import socket
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import mtrl
from tests import forked

ROOT = Path(mtrl.__file__).parent.parent
LIMIT = 300
"""Seconds after which a rank that is still running counts as hung."""

RANKS = """
import json, os, sys
import mtrl.distributed.rank_group

body, folder, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
children = []
for rank in range(size):
    if child := os.fork():
        children.append(child)
        continue
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
    exec(body, {"__name__": "rank"})
    break  # to the end of the program, as any other
else:
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""

RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.errors import UserError

class Worker:
    def pid(self):
        return os.getpid()
    def tell(self, *args):
        return (world.rank, *args)
    def total(self, x):
        total = torch.tensor(float(x))
        dist.all_reduce(total)
        return total.item()
    def refuse(self, ranks):
        if world.rank in ranks:
            raise UserError(f"rank {world.rank} does not like it")
        return "fine"
    def fail(self, rank):
        if world.rank == rank:
            raise ZeroDivisionError("boom")
        return self.total(1)
    def kill(self, rank):
        if world.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.total(1)
    def sleep(self, rank, seconds):
        if world.rank == rank:
            time.sleep(seconds)

world = World.join(TIMEOUT)
rank_group = RankGroup(world, Worker())
try:
    if world.is_leader:
        try:
            lead()
        finally:
            rank_group.dismiss()
    else:
        rank_group.follow()
finally:
    world.close()
"""


@dataclass
class Ended:
    """Exit of a rank."""

    status: int
    out: list[str]
    err: list[str]
    """Lines of stderr, without the warnings of PyTorch."""


def play(folder, body, size=2, timeout=30.0):
    """Run ranks whose leader executes `body` with `world` and `rank_group`. Return the exit of each; none may hang."""
    lead = f"TIMEOUT = {timeout}\ndef lead():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
    return run_ranks_of(folder, lead + RANK, size)


def run_ranks_of(folder, program, size):
    """Run the same program on every rank, with the environment of torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    process = forked.Popen(
        [sys.executable, "-c", RANKS, program, str(folder), str(size)],
        env={**os.environ, **meeting, "PYTHONPATH": str(ROOT)},
        stdout=PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=LIMIT)
        return [Ended(status, *(lines(folder, rank, name) for name in ("out", "err")))
                for rank, status in enumerate(json.loads(out))]  # fmt: skip
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def lines(folder, rank, name):
    return [line for line in (folder / f"{rank}.{name}").read_text().splitlines() if line and line[:2] != "[W"]
