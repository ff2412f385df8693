"""The ranks of a job: the rank of this process, and the exchange of values between ranks."""

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

from mtrl.distributed.ending import Departure, Unwinding, end_process
from mtrl.distributed.lifeline import BEAT, Lifeline, is_of_network, shortened
from mtrl.errors import JobLost, UserError
from mtrl.utils.process import environment_integer, is_launched

T = TypeVar("T")

UNLIMITED = timedelta(days=1000)


@dataclass(frozen=True)
class Links:
    """The process groups besides the default one; all are gloo, so that they work while GPUs are busy."""

    orders: dist.ProcessGroup
    """Group for messages from the leader to followers. Waits have no time limit, since rollouts may take hours; the
    lifeline ends them if the leader is lost."""
    answers: dist.ProcessGroup
    """Group for messages from followers to the leader, with the time limit."""
    background: dist.ProcessGroup
    """Group for a thread beside training, such as one that writes a checkpoint."""
    lifeline: Lifeline
    ending: Departure | Unwinding


@dataclass(frozen=True)
class World:
    """This process among the ranks of its job. `World()` is a single process: every method works without
    torch.distributed."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank of the process on its machine."""
    links: Links | None = field(default=None, repr=False, compare=False)

    @classmethod
    def join(cls, timeout: float) -> World:
        """Connect to the other ranks that `torchrun` started, and initialise the default process group. Without a
        launch, return `World()`.

        Args:
            timeout: time limit for waits between ranks, in seconds. The leader's value holds on every rank; a
                follower's own value only limits its wait for the leader to join.

        Raises:
            UserError: variables of the launch are missing or invalid, its port is taken, or there are fewer GPUs than
                ranks.
            JobLost: the other ranks did not join in time.
        """
        if not is_launched():
            return cls()
        rank, size, local_rank = (environment_integer(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise UserError(
                f"the environment has RANK={rank} and WORLD_SIZE={size}, but not both of MASTER_ADDR and "
                "MASTER_PORT; start them with torchrun, or unset RANK and WORLD_SIZE"
            )
        environment_integer("MASTER_PORT")
        backend = _choose_device(local_rank)
        try:
            links = connect_ranks(backend, rank, size, timeout)
        except BaseException as error:
            with suppress(Exception):
                dist.destroy_process_group()
            if isinstance(error, RuntimeError):
                raise _not_joined(error, rank, size, timeout) from error
            raise
        return cls(rank, size, local_rank, links)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader, rank 0."""
        return self.rank == 0

    @property
    def background_group(self) -> dist.ProcessGroup | None:
        """A separate gloo group for collectives in a background thread; None for a single process."""
        return self.links.background if self.links else None

    def broadcast(self, value: T) -> T:
        """Return the leader's value on every rank. The value must be picklable; the values of other ranks are
        ignored."""
        if self.links is None:
            return value
        box: list[Any] = [value if self.is_leader else None]
        with self.reporting_errors():
            dist.broadcast_object_list(box, 0, self.links.orders)
        return box[0]

    def scatter(self, shares: Sequence[T] | None) -> T:
        """Return this rank's share. On the leader, `shares` has one share per rank; on other ranks it is None."""
        if self.is_leader and (shares is None or len(shares) != self.size):
            raise ValueError(f"{self.size} ranks need a share each, and there are {len(shares or ())}")
        if self.links is None:
            return shares[0]  # type: ignore[index]
        box: list[Any] = [None]
        with self.reporting_errors():
            dist.scatter_object_list(box, list(shares) if shares is not None else None, 0, self.links.orders)
        return box[0]

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks, in the order of ranks, on the leader; None on the other ranks. Those of
        followers must be picklable; the leader's own value is returned itself, so that it may be large."""
        if self.links is None:
            return [value]
        boxes: list[Any] | None = [None] * self.size if self.is_leader else None
        with self.reporting_errors():
            # PyTorch pads the message of every rank to the longest one, so weights that rank 0 returns must not be one.
            dist.gather_object(None if self.is_leader else value, boxes, 0, self.links.answers)
        if boxes is not None:
            boxes[0] = value
        return boxes

    def close(self) -> None:
        """Destroy all process groups. It must be called on every path, since gloo may abort a process that ends with a
        group.

        If it is called while an exception propagates (`finally`, `contextlib.closing`), it notifies the other ranks.
        """
        error = sys.exc_info()[1]
        if self.links is not None:
            if error is not None and not isinstance(error, JobLost):
                self.links.lifeline.fail(f"rank {self.rank} failed ({_named(error)})")
            self.links.lifeline.close()
            self.links.ending.close()
            if self.links.lifeline.is_stuck:  # the thread cannot be ended, and the interpreter's end would abort
                reason = "a rank does not answer" if error is None else _named(error)
                end_process(error if isinstance(error, JobLost) else JobLost(self.rank, self.size, reason))
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Context for joint work of the ranks: an exception in it ends the job, and the other ranks receive the reason.

        Raises:
            JobLost: another rank is lost or has failed; on followers also if they failed themselves.
        """
        try:
            yield
        except BaseException as error:
            if self.links is None or isinstance(error, JobLost):
                raise
            if is_of_network(error):  # the lifeline knows which rank is lost
                reason = self.links.lifeline.verdict() or _connection_reason(error)
                self.links.lifeline.fail(f"for rank {self.rank}, {reason}")
                raise JobLost(self.rank, self.size, reason) from None
            self.links.lifeline.fail(f"rank {self.rank} failed ({_named(error)})")
            if self.is_leader:
                raise
            traceback.print_exception(error)
            raise JobLost(self.rank, self.size, _named(error)) from None


def all_sum(value: float, device: torch.device) -> float:
    """Return the sum over all ranks, on each rank; `value` itself for a single process.

    Every rank must call it. With NCCL, `device` is the rank's GPU.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {shortened(error)}" if str(error) else type(error).__name__


def _connection_reason(error: BaseException) -> str:
    message = shortened(error)
    if "imed out" in message:
        return f"the other ranks took longer than trainer.fsdp.timeout ({message})"
    return f"the connection between the ranks is lost ({message})"


def _not_joined(error: RuntimeError, rank: int, size: int, timeout: float) -> UserError | JobLost:
    """Return the error for ranks that could not connect to each other."""
    if "EADDRINUSE" in str(error):
        return UserError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} is in use by another program; set another port, "
            "or let torchrun --standalone find one"
        )
    reason = (
        f"the other ranks did not join within {timeout:g} s ({shortened(error)}); if nothing started them, unset RANK "
        "and WORLD_SIZE"
    )
    return JobLost(rank, size, reason)


def _choose_device(local_rank: int) -> str:
    """Select this rank's GPU, if there are GPUs. Return the backend of the default process group."""
    if not torch.cuda.is_available():
        return "gloo"
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started rank {local_rank} on a machine with {torch.cuda.device_count()} GPUs; lower "
            "--nproc-per-node to that, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    # With this, a collective that a lost rank never joins ends the process after the time limit.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"


def connect_ranks(backend: str, rank: int, size: int, timeout: float) -> Links | None:
    """Create the process groups, the lifeline's first, so that the lifeline is active while the others are created.
    Return None for a single rank."""
    board, rank, size = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout))))
    store = _own_store(board, rank, timeout)
    if rank == 0:
        store.set("timeout", str(timeout))
    limit = timedelta(seconds=float(store.get("timeout")))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    if size == 1:
        return None
    # A follower waits twice as long for the leader, since the leader may be waiting for another follower.
    watched = dist.new_group(backend="gloo", timeout=limit if rank == 0 else 2 * limit)
    ending = Departure(rank, size) if rank else Unwinding(rank, size)
    lifeline = Lifeline(rank, size, watched, min(BEAT, limit.total_seconds() / 4), ending)
    try:
        orders, answers, background = (dist.new_group(backend="gloo", timeout=t) for t in (UNLIMITED, limit, limit))
    except BaseException:  # also an exception that the lifeline raises in this thread
        lifeline.close()
        ending.close()
        raise
    return Links(orders, answers, background, lifeline, ending)


def _own_store(board: dist.Store, rank: int, timeout: float) -> dist.Store:
    """Return the store through which the ranks of this attempt find each other. The leader holds it, and it ends with
    the leader.

    torchrun's own store lives as long as its agents. After a restart it still has the addresses of the previous ranks,
    which gloo would use as the addresses of its peers. So torchrun's store is used only to publish the port of the
    leader's store. A follower that finds the port of an earlier leader, where no process listens any more, waits for
    the next entry.
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
