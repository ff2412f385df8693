"""A separate process group that broadcasts weights from the trainer (rank 0) to the workers of engines.

It is independent of the default process group of either side, and changes no global state of `torch.distributed`. Its
store keys have the names of SGLang's `init_custom_process_group` (`srt/utils/common.py`, after OpenRLHF's), so that
either side may be SGLang's. The module imports only torch, the standard library and `mtrl.utils.serving`, since it also
runs inside an engine's environment.
"""

from __future__ import annotations

import atexit
import math
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtrl.utils.serving import is_loopback

NCCL_PATIENCE = 10
"""Factor by which NCCL's time limit exceeds ours. NCCL's watchdog ends the whole process, so our limit must come
first."""
_LOOK = 0.01
"""Interval between two checks of a transfer on a GPU, in seconds."""


class GroupMembership:
    """Membership of this process in a process group."""

    def __init__(self, process_group: Any, device: torch.device):
        """`process_group` is torch's `ProcessGroupGloo` or `ProcessGroupNCCL`; the tensors it sends are on `device`."""
        self._process_group, self.device = process_group, device
        _OPEN.add(self)

    def send(self, flat: Tensor, timeout: float) -> None:
        """Broadcast `flat` from rank 0 and wait until the broadcast is done on this rank. Every rank must call it."""
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
            del work  # it references the group, and an error's traceback would keep it alive

    def leave(self) -> None:
        """Leave the group; see the function `leave`."""
        process_group, self._process_group = self._process_group, None
        _OPEN.discard(self)
        if process_group is not None:
            for end in (process_group.abort, process_group.shutdown):
                with suppress(Exception):
                    end()


_OPEN: weakref.WeakSet[GroupMembership] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """Leave all groups at exit, since gloo may abort a process that ends as a member of a group (`terminate called
    without an active exception`)."""
    for group in list(_OPEN):
        group.leave()


def open_store(host: str, timeout: float) -> dist.TCPStore:
    """Open the store through which members find each other, at a free port of `host`. It lives as long as the returned
    object; members that still wait for others when it is closed get an error at once.

    It listens only at the address of `host`. A TCPStore that creates its own socket would listen at every address of
    the machine, and a TCPStore has no authentication.
    """
    listener = socket.create_server((host, 0), family=_family(host))
    port = listener.getsockname()[1]
    return dist.TCPStore(  # takes ownership of the socket
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Connect to a store that `open_store` opened. Connection attempts are repeated until the timeout, in seconds."""
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
) -> GroupMembership:
    """Join a group; return when all members have joined.

    Args:
        backend: gloo, or nccl with the current CUDA device (with nccl, members connect at the first broadcast).
        host: address of the store, which is the trainer's.
        name: name of the group.
        timeout: time limit for joining and for each broadcast, in seconds.
        store: a connection to the store, from `connect`; None: a new connection is made.

    Raises:
        RuntimeError: the other members did not join in time, or the store was closed (torch's `DistError` and its
            subclasses).
        ValueError: the backend is neither gloo nor nccl.
    """
    limit = timedelta(seconds=timeout)
    store = connect(host, port, timeout) if store is None else store
    members = dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store))
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [_gloo_device(host)]
        return GroupMembership(
            dist.ProcessGroupGloo(dist.PrefixStore("cpu/", members), rank, world_size, options), torch.device("cpu")
        )
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_PATIENCE * limit
        options.global_ranks_in_group = []
        options.group_name = name  # type: ignore[assignment]
        device = torch.device("cuda", torch.cuda.current_device())
        return GroupMembership(
            dist.ProcessGroupNCCL(dist.PrefixStore("cuda/", members), rank, world_size, options), device
        )
    raise ValueError(f"weights are broadcast by gloo or nccl, not by {backend}")


def broadcast(group: GroupMembership, tensors: Sequence[Tensor], timeout: float) -> None:
    """Send tensors from rank 0, as one message of bytes (SGLang's `flattened_bucket`). When it returns, the tensors may
    be changed.

    Raises:
        RuntimeError: a member is lost, or the time limit has passed. The group is then unusable: call `leave`.
    """
    group.send(flatten(tensors).to(group.device), timeout)


def receive(
    group: GroupMembership,
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    device: torch.device | str,
    timeout: float,
) -> list[Tensor]:
    """Receive the tensors that rank 0 sends by `broadcast`: views of one buffer on `device`, in the sender's order.

    Args:
        dtypes: names of the dtypes in torch (`bfloat16`).

    Raises:
        RuntimeError: as for `broadcast`.
    """
    kinds = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.send(flat, timeout)
    parts = flat.split(sizes)
    return [part.view(kind).reshape(tuple(shape)) for part, kind, shape in zip(parts, kinds, shapes, strict=True)]


def leave(group: GroupMembership) -> None:
    """Leave the group, in any state. It must be called on every path: see `_leave_all`.

    A broadcast that waits in another thread ends at its time limit; gloo cannot cancel it.
    """
    group.leave()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of all tensors without gaps. Tensors must have one dtype or be sorted by decreasing element
    size, so that views are aligned; `buckets` yields parts of one dtype."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the weights in parts of at most `limit` bytes, or of a single larger tensor; `weights` is read only as far
    as the next part needs. Each part has one dtype, so that all tensors are aligned."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if part and (tensor.dtype != part[0][1].dtype or size + tensor.nbytes > limit):
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def _wait_on_gpu(work: Any, flat: Tensor, timeout: float) -> None:
    """Wait for a broadcast on a GPU with a time limit. `work.wait()` would block the stream and not this thread, and
    its timeout raises no exception that can be caught."""
    end = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"the broadcast of {flat.nbytes} bytes was not over after {timeout:g} s")
        time.sleep(_LOOK)
    work.wait()  # raises the error of the transfer, if any
    torch.cuda.current_stream().synchronize()


def _gloo_device(host: str) -> Any:
    """Return gloo's network device: loopback if the store is on loopback, since peers may not be able to reach the
    address that the machine's own name resolves to."""
    if is_loopback(host):
        return dist.ProcessGroupGloo.create_device(hostname=host)
    return dist.ProcessGroupGloo.create_default_device()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
