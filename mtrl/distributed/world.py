"""The ranks of a job: who this process is among them, and how values travel between them."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mtrl.distributed import launch
from mtrl.distributed.ending import Departure, Unwinding, end_process
from mtrl.distributed.lifeline import BEAT, Lifeline, is_of_network, shortened
from mtrl.errors import JobLost, UserError

T = TypeVar("T")

UNLIMITED = timedelta(days=1000)


@dataclass(frozen=True)
class Links:
    """The process groups beside the default one; all are gloo, so that they work while GPUs are busy."""

    orders: dist.ProcessGroup
    """Leader to followers. Waits have no limit of their own: rollouts may take hours, and the lifeline ends those of
    ranks that the leader has left."""
    answers: dist.ProcessGroup
    """Followers to leader, within the time limit."""
    background: dist.ProcessGroup
    """For a thread beside training, such as one that writes a checkpoint."""
    lifeline: Lifeline
    ending: Departure | Unwinding


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job. `World()` is alone: every method works, without torch.distributed."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank on this machine."""
    links: Links | None = field(default=None, repr=False, compare=False)

    @classmethod
    def join(cls, timeout: float) -> World:
        """Meet the other ranks that `torchrun` started, and initialise the default process group; alone: `World()`.

        Args:
            timeout: seconds that ranks wait for each other. The leader's holds on every rank; a follower's own is how
                long it waits for the leader to come.

        Raises:
            UserError: the environment is not that of a launch, its port is taken, or there are fewer GPUs than ranks.
            JobLost: the others did not come.
        """
        if not launch.is_launched():
            return cls()
        rank, size, local_rank = (launch.number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise UserError(
                f"the environment has RANK={rank} and WORLD_SIZE={size}, but neither MASTER_ADDR nor MASTER_PORT says "
                "where the ranks meet; start them with torchrun, or unset RANK and WORLD_SIZE"
            )
        launch.number("MASTER_PORT")
        backend = _choose_device(local_rank)
        try:
            links = _meet(backend, rank, size, timeout)
        except BaseException as error:
            with suppress(Exception):
                dist.destroy_process_group()
            if isinstance(error, RuntimeError):
                raise _alone(error, rank, size, timeout) from error
            raise
        return cls(rank, size, local_rank, links)

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    @property
    def background_group(self) -> dist.ProcessGroup | None:
        """A gloo group of its own, for collectives in a thread; None where the process is alone."""
        return self.links.background if self.links else None

    def broadcast(self, value: T) -> T:
        """The leader's value, on every rank. It may be anything that pickles; what others pass is not looked at."""
        if self.links is None:
            return value
        box: list[Any] = [value if self.is_leader else None]
        with self.telling():
            dist.broadcast_object_list(box, 0, self.links.orders)
        return box[0]

    def scatter(self, shares: Sequence[T] | None) -> T:
        """This rank's share of what the leader deals out: `shares` has one per rank, and is None on other ranks."""
        if self.is_leader and (shares is None or len(shares) != self.size):
            raise ValueError(f"{self.size} ranks need a share each, and there are {len(shares or ())}")
        if self.links is None:
            return shares[0]  # type: ignore[index]
        box: list[Any] = [None]
        with self.telling():
            dist.scatter_object_list(box, list(shares) if shares is not None else None, 0, self.links.orders)
        return box[0]

    def gather(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on the leader; None on the others."""
        if self.links is None:
            return [value]
        boxes: list[Any] | None = [None] * self.size if self.is_leader else None
        with self.telling():
            dist.gather_object(value, boxes, 0, self.links.answers)
        return boxes

    def close(self) -> None:
        """Leave: tear down every process group. On every path, since gloo may abort a process that ends with one.

        Called while an exception is on its way out (`finally`, `contextlib.closing`), it tells the other ranks.
        """
        error = sys.exc_info()[1]
        if self.links is not None:
            if error is not None and not isinstance(error, JobLost):
                self.links.lifeline.fail(f"rank {self.rank} failed ({_named(error)})")
            self.links.lifeline.close()
            self.links.ending.close()
            if self.links.lifeline.is_stuck:  # and cannot be ended, nor survive the interpreter's end without an abort
                reason = "a rank does not answer" if error is None else _named(error)
                end_process(error if isinstance(error, JobLost) else JobLost(self.rank, self.size, reason))
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around what ranks do together: whatever is raised here ends the job, and the others are told why.

        Raises:
            JobLost: another rank is gone or has failed; on followers also after a fault of their own.
        """
        try:
            yield
        except BaseException as error:
            if self.links is None or isinstance(error, JobLost):
                raise
            if is_of_network(error):  # the lifeline knows better who is gone
                reason = self.links.lifeline.verdict() or _apart(error)
                self.links.lifeline.fail(f"for rank {self.rank}, {reason}")
                raise JobLost(self.rank, self.size, reason) from None
            self.links.lifeline.fail(f"rank {self.rank} failed ({_named(error)})")
            if self.is_leader:
                raise
            traceback.print_exception(error)
            raise JobLost(self.rank, self.size, _named(error)) from None


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {shortened(error)}" if str(error) else type(error).__name__


def _apart(error: BaseException) -> str:
    said = shortened(error)
    if "imed out" in said:
        return f"the other ranks took longer than trainer.fsdp.timeout ({said})"
    return f"the ranks have lost each other ({said})"


def _alone(error: RuntimeError, rank: int, size: int, timeout: float) -> UserError | JobLost:
    """What to say when the ranks did not meet."""
    if "EADDRINUSE" in str(error):
        return UserError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}, where the ranks meet, is taken by another program; set another "
            "port, or let torchrun --standalone find one"
        )
    reason = (
        f"the other ranks did not come within {timeout:g} s ({shortened(error)}); if nothing started them, unset RANK "
        "and WORLD_SIZE"
    )
    return JobLost(rank, size, reason)


def _choose_device(local_rank: int) -> str:
    """Take this rank's GPU, where there are any; the backend of the default process group."""
    if not torch.cuda.is_available():
        return "gloo"
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started rank {local_rank} on a machine with {torch.cuda.device_count()} GPUs; lower "
            "--nproc-per-node to that, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    # A collective that a lost rank never joins ends the process after the time limit instead of waiting for ever.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


def _meet(backend: str, rank: int, size: int, timeout: float) -> Links | None:
    """Make the process groups, the lifeline's first, so that it watches over the others. None for a single rank."""
    board, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout))))
    store = _own_store(board, rank, timeout)
    if rank == 0:
        store.set("timeout", str(timeout))
    limit = timedelta(seconds=float(store.get("timeout")))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    if size == 1:
        return None
    # A follower gives the leader twice the time: the leader may be waiting for another follower just now.
    watched = dist.new_group(backend="gloo", timeout=limit if rank == 0 else 2 * limit)
    ending = Departure(rank, size) if rank else Unwinding(rank, size)
    lifeline = Lifeline(rank, size, watched, min(BEAT, limit.total_seconds() / 4), ending)
    try:
        orders, answers, background = (dist.new_group(backend="gloo", timeout=t) for t in (UNLIMITED, limit, limit))
    except BaseException:  # also what the lifeline raises here
        lifeline.close()
        ending.close()
        raise
    return Links(orders, answers, background, lifeline, ending)


def _own_store(board: dist.Store, rank: int, timeout: float) -> dist.Store:
    """Where the ranks of this attempt find each other: a store that the leader holds, and that ends with it.

    torchrun's lives as long as its agents do. After a restart it still has the addresses of the ranks before, which
    gloo would take for those of its peers. So it only says where the leader's is; and a follower that finds the address
    of a leader before this one, where nobody listens any more, waits for the next.
    """
    host, limit = os.environ["MASTER_ADDR"], timedelta(seconds=timeout)
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        board.set(f"mtrl/leader/{board.add('mtrl/leaders', 1)}", str(store.port))
        return store
    for number in count(max(1, board.add("mtrl/leaders", 0))):
        port = int(board.get(f"mtrl/leader/{number}"))
        with suppress(OSError):
            socket.create_connection((host, port), timeout=timeout).close()
            return dist.TCPStore(host, port, is_master=False, timeout=limit)
    raise AssertionError("unreachable")
