"""Weight sync through memory that trainer and servers share: files in shared memory, or CUDA IPC on a GPU."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.multiprocessing  # its import registers tensors with ForkingPickler
from torch import Tensor
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef

from mtrl.config.derived import WEIGHT_BUCKET
from mtrl.config.engine_schema import ServerConfig
from mtrl.distributed.broadcast import buckets, flatten
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.export import WeightExport
from mtrl.engines.server.server_api import ServerApi
from mtrl.engines.server.shm_manager import SHARED_MEMORY, start_manager
from mtrl.engines.server.sync import UpdateSteps, engine_key
from mtrl.errors import UserError
from mtrl.utils.serving import is_loopback

_DEVICE = 6
"""Index of the argument of torch's `rebuild_cuda_tensor` that is the number of the GPU."""
_strategy = threading.Lock()


class TensorSync:
    """See `WeightSync`. Servers receive only the names and memory locations of the tensors, and copy the tensors from
    the trainer's memory."""

    def __init__(self, settings: ServerConfig, export: WeightExport, bucket: int = WEIGHT_BUCKET):
        """
        Raises:
            UserError: a server may be on another machine.
        """
        self._key = f"{engine_key(settings)}.weight_sync=tensor"
        self._seconds, self._workers = settings.sync_timeout, settings.tensor_parallel_size
        self._export, self._bucket, self.sent_bytes = export, bucket, 0
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._check_local(settings.urls)

    async def prepare(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Do nothing: tensors are converted as they are sent."""

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        self._check_local([server.url for server in servers])
        exported = await asyncio.to_thread(self._export, weights)
        steps = UpdateSteps(servers)
        await steps.each(lambda server: server.begin_update(), self._seconds)
        parts, self.sent_bytes = buckets(exported, self._bucket), 0
        while shared := await asyncio.to_thread(self._share_next, parts):
            was_read = False
            self.sent_bytes += sum(value.nbytes for value in shared.tensors.values())
            try:
                digest = await asyncio.to_thread(shared.checksum)
                payloads = {server.url: shared.payloads(self._workers) for server in steps.remaining}
                await steps.each(
                    lambda server, payloads=payloads, digest=digest: server.receive_tensors(  # type: ignore[misc]
                        payloads[server.url], version, digest
                    ),
                    self._seconds,
                )
                was_read = set(payloads) == {server.url for server in steps.remaining}
            finally:
                shared.close(was_read)
        await steps.each(lambda server: server.end_update(version), self._seconds)
        steps.check()

    async def close(self) -> None:
        """Do nothing: `send` leaves no state."""

    def _share_next(self, parts: Iterator[list[tuple[str, Tensor]]]) -> SharedTensors | None:
        """Share the next part; None after the last."""
        part = next(parts, None)
        return None if part is None else self._share(dict(part))

    def _share(self, tensors: Mapping[str, Tensor]) -> SharedTensors:
        size = sum(value.nbytes for value in tensors.values())
        if self._device is None and (free := shutil.disk_usage(SHARED_MEMORY).free) < size:
            raise UserError(
                f"{self._key} needs {size / 1e6:.0f} MB of shared memory, and {SHARED_MEMORY} has {free / 1e6:.0f} MB "
                "free; enlarge it (docker run --shm-size), or use weight_sync=disk"
            )
        return SharedTensors(tensors, self._device)

    def _check_local(self, urls: Sequence[str]) -> None:
        for url in urls:
            if not is_loopback(urlsplit(url).hostname or ""):
                raise UserError(
                    f"{self._key} reaches only servers on this machine, and {url} may be on another one; write "
                    "127.0.0.1 if it is not, or use weight_sync=distributed, or disk with a sync_folder that both can "
                    "read"
                )


class SharedTensors:
    """Copies of tensors of one dtype in one block of memory that other processes can map."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None):
        """`device`: the GPU that holds the copies; None: CPU memory."""
        flat = flatten(list(tensors.values()))
        if device is None:
            with _file_system():
                start_manager()
                flat.share_memory_()
        else:
            flat = flat.to(device)
            torch.cuda.current_stream(device).synchronize()  # other processes do not wait for our streams
        self._flat: Tensor | None = flat
        parts = flat.split([value.nbytes for value in tensors.values()])
        self.tensors = {
            name: part.view(value.dtype).reshape(value.shape)
            for (name, value), part in zip(tensors.items(), parts, strict=True)
        }

    def checksum(self) -> str:
        """Return the checksum of all tensors. A thread that computed it keeps no tensor: it may hold the arguments of
        its last call for a moment longer, and tensors among them would keep `close` from freeing the memory."""
        return checksum(self.tensors)

    def payloads(self, readers: int) -> list[str]:
        """Return a payload for each of `readers` processes: base64 of the `ForkingPickler` output for
        `[(name, tensor), …]`.

        Every pickling takes a reference to the memory, which its reader releases. CUDA counts the references of each
        pickling separately, so a payload that no process reads would keep the memory on the GPU for ever, and one that
        two processes read would free it too early.
        """
        return [self._payload() for _ in range(readers)]

    def _payload(self) -> str:
        buffer = io.BytesIO()
        pickler = ForkingPickler(buffer)
        pickler.dispatch_table[Tensor] = _reduce
        with _file_system():
            pickler.dump(list(self.tensors.items()))
        return base64.b64encode(buffer.getvalue()).decode()

    def close(self, was_read: bool) -> None:
        """Free the memory.

        Args:
            was_read: whether every server has read its payload. If so, the last process that releases the file removes
                it, and it must not be removed here, because torch ends a process whose file is missing. The references
                of an unread payload would keep the file forever, so it is removed here.
        """
        assert self._flat is not None
        storage = self._flat.untyped_storage()
        is_file, watch = not storage.is_cuda, StorageWeakRef(storage)
        handle = os.fsdecode(storage._share_filename_cpu_()[1]) if is_file else ""
        self._flat, self.tensors = None, {}
        del storage
        if is_file and not was_read and watch.expired():
            with suppress(OSError):
                os.unlink(SHARED_MEMORY / handle.lstrip("/"))
        if not is_file:
            torch.cuda.ipc_collect()  # torch itself frees memory that was read only when it needs some


def _reduce(tensor: Tensor) -> Any:
    """Pickle a tensor like torch, but name a GPU by its UUID, which is the same in all processes (SGLang reads it). The
    number of a GPU depends on CUDA_VISIBLE_DEVICES."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        name = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], name, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _file_system() -> Iterator[None]:
    """Make torch share memory by files within the context. Its other strategy, by descriptors, works only between a
    parent and its child."""
    with _strategy:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
