"""A process group of its own for weights that go from the trainer (rank 0) to the workers of engines.

It stands beside whatever default group either side has, or none, and touches no global state of `torch.distributed`.
The names of its keys are those of SGLang's `init_custom_process_group` (`srt/utils/common.py`, after OpenRLHF's), so
that either side may be SGLang's. Torch and the standard library only: it also runs inside an engine's environment.
"""

from __future__ import annotations

import atexit
import ipaddress
import math
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NCCL_PATIENCE = 10
"""NCCL's watchdog ends the whole process after its time limit, so it gets this many times ours, which comes first."""
_LOOK = 0.01
"""Seconds between two looks at a transfer that runs on a GPU."""


class Group:
    """A member's place in a group."""

    def __init__(self, process_group: Any, device: torch.device):
        """`process_group` is torch's `ProcessGroupGloo` or `ProcessGroupNCCL`; what it sends lies on `device`."""
        self._process_group, self.device = process_group, device
        _OPEN.add(self)

    def send(self, flat: Tensor, timeout: float) -> None:
        """Broadcast `flat` from rank 0, on every rank, and wait until it is done here."""
        if self._process_group is None:
            raise RuntimeError("the group was left")
        limit = timedelta(seconds=timeout)
        work = self._process_group.broadcast(flat, 0, limit)
        try:
            if flat.is_cuda:
                _wait_on_gpu(work, flat, timeout)
            else:
                work.wait(limit)
        finally:
            del work  # it holds the group, and an error's traceback would hold it

    def leave(self) -> None:
        """See `leave`."""
        process_group, self._process_group = self._process_group, None
        _OPEN.discard(self)
        if process_group is not None:
            for end in (process_group.abort, process_group.shutdown):
                with suppress(Exception):
                    end()


_OPEN: weakref.WeakSet[Group] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """gloo may abort a process that ends with a group in it (`terminate called without an active exception`)."""
    for group in list(_OPEN):
        group.leave()


def open_store(host: str, timeout: float) -> dist.TCPStore:
    """Where members find each other, at a free port of `host`. It lives as long as the returned object: who is
    connected and waits for others when it goes gets an error at once.

    It listens at that address only. A TCPStore of its own making would listen at every address of the machine, and it
    asks nobody for a password.
    """
    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # which owns the socket from here on
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(host: str, port: int, timeout: float) -> dist.TCPStore:
    """To a store that `open_store` opened. Where none is, it is tried again until the time is over."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


def join_group(
    backend: str,
    host: str,
    port: int,
    world_size: int,
    rank: int,
    name: str,
    timeout: float,
    store: dist.Store | None = None,
) -> Group:
    """Become a member; returns when all have come.

    Args:
        backend: gloo, or nccl with the current CUDA device (members are met at the first broadcast then).
        host: where the store is: the trainer's address.
        name: of the group.
        timeout: seconds, for the meeting and for every broadcast.
        store: a connection to it (`connect`); None: it is made.

    Raises:
        RuntimeError: the others did not come in time, or the store was closed (torch's `DistError` and its kinds).
        ValueError: another backend.
    """
    limit = timedelta(seconds=timeout)
    store = connect(host, port, timeout) if store is None else store
    members = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [_gloo_device(host)]
        return Group(
            dist.ProcessGroupGloo(dist.PrefixStore("cpu/", members), rank, world_size, options), torch.device("cpu")
        )
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_PATIENCE * limit
        options.global_ranks_in_group = []
        options.group_name = name  # type: ignore[assignment]
        device = torch.device("cuda", torch.cuda.current_device())
        return Group(dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", members), rank, world_size, options), device)
    raise ValueError(f"weights are broadcast by gloo or nccl, not by {backend}")


def broadcast(group: Group, tensors: Sequence[Tensor], timeout: float) -> None:
    """Rank 0 sends these, as one message of bytes (SGLang's `flattened_bucket`); returns when they are on their way
    and may be changed.

    Raises:
        RuntimeError: a member is gone, or the time limit is over. The group is of no use any more: `leave` it.
    """
    group.send(flatten(tensors).to(group.device), timeout)


def receive(
    group: Group, dtypes: Sequence[str], shapes: Sequence[Sequence[int]], device: torch.device | str, timeout: float
) -> list[Tensor]:
    """What rank 0 sends by `broadcast`: views of one buffer on `device`, in its order.

    Args:
        dtypes: as torch calls them (`bfloat16`).

    Raises:
        RuntimeError: as `broadcast`.
    """
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.send(flat, timeout)
    parts = flat.split(sizes)
    return [part.view(kind).reshape(tuple(shape)) for part, kind, shape in zip(parts, kinds, shapes, strict=True)]


def leave(group: Group) -> None:
    """Give the group up, whatever state it is in. On every path: see `_leave_all`.

    A broadcast that waits in another thread ends by its time limit; gloo has no way to cut it short.
    """
    group.leave()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all, one after the other, without gaps: put wider types first (`buckets` does)."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def buckets(weights: Sequence[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Weights in parts of at most `limit` bytes, or of one tensor; each of one dtype, so that all lie aligned."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in sorted(weights, key=lambda item: str(item[1].dtype)):  # stable: their order stays
        if part and (tensor.dtype != part[0][1].dtype or sum(t.nbytes for _, t in part) + tensor.nbytes > limit):
            yield part
            part = []
        part.append((name, tensor))
    if part:
        yield part


def _wait_on_gpu(work: Any, flat: Tensor, timeout: float) -> None:
    """`work.wait()` would make the stream wait, and not this thread; nor is there a time limit that can be caught."""
    end = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"the broadcast of {flat.nbytes} bytes was not over after {timeout:g} s")
        time.sleep(_LOOK)
    work.wait()  # raises what went wrong
    torch.cuda.current_stream().synchronize()


def _gloo_device(host: str) -> Any:
    """Loopback where the store is there: a machine's own name need not lead to an address that peers reach."""
    if is_loopback(host):
        return dist.ProcessGroupGloo.create_device(hostname=host)
    return dist.ProcessGroupGloo.create_default_device()


def is_loopback(host: str) -> bool:
    """Whether this name or address is the same machine's."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
