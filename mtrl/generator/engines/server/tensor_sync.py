"""Weights out of memory that trainer and servers both see: files in shared memory, or CUDA IPC on a GPU."""

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
import torch.multiprocessing  # whose import teaches ForkingPickler about tensors
from torch import Tensor
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import StorageWeakRef

from mtrl.config.engine_schema import ServerConfig
from mtrl.distributed.broadcast import buckets, flatten, is_loopback
from mtrl.errors import UserError
from mtrl.generator.engines.server.api import ServerApi
from mtrl.generator.engines.server.checksum import checksum
from mtrl.generator.engines.server.outgoing import Outgoing
from mtrl.generator.engines.server.shm_manager import SHARED_MEMORY, start_manager
from mtrl.generator.engines.server.sync import Company, engine_key

BUCKET = 2**29
"""Bytes of shared memory at a time."""
_DEVICE = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the number of the GPU."""
_strategy = threading.Lock()


class TensorSync:
    """See `WeightSync`. Only names and places travel to the servers, which copy the tensors out of our memory."""

    def __init__(self, settings: ServerConfig, outgoing: Outgoing, bucket: int = BUCKET):
        """
        Raises:
            UserError: a server is on another machine.
        """
        self._key = f"{engine_key(settings)}.weight_sync=tensor"
        self._seconds, self._workers = settings.sync_timeout, settings.tensor_parallel_size
        self._outgoing, self._bucket = outgoing, bucket
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        self._check_near(settings.urls)

    async def send(self, servers: Sequence[ServerApi], weights: Mapping[str, Tensor], version: int) -> None:
        self._check_near([server.url for server in servers])
        whole = await asyncio.to_thread(self._outgoing, weights)
        company = Company(servers)
        await company.each(lambda server: server.begin_update(), self._seconds)
        for part in buckets(list(whole.items()), self._bucket):
            shared = await asyncio.to_thread(self._share, dict(part))
            was_read = False
            try:
                word = await asyncio.to_thread(checksum, shared.tensors)
                # One payload for each, since everybody who reads one gives a reference back.
                payloads = {server.url: shared.payload(self._workers) for server in company.left}
                await company.each(
                    lambda server, payloads=payloads, word=word: server.receive_tensors(  # type: ignore[misc]
                        payloads[server.url], version, word
                    ),
                    self._seconds,
                )
                was_read = set(payloads) == {server.url for server in company.left}
            finally:
                shared.close(was_read)
        await company.each(lambda server: server.end_update(version), self._seconds)
        company.check()

    async def close(self) -> None:
        """Nothing outlives `send`."""

    def _share(self, tensors: Mapping[str, Tensor]) -> SharedTensors:
        size = sum(value.nbytes for value in tensors.values())
        if self._device is None and (free := shutil.disk_usage(SHARED_MEMORY).free) < size:
            raise UserError(
                f"{self._key} needs {size / 1e6:.0f} MB of shared memory, and {SHARED_MEMORY} has {free / 1e6:.0f} MB "
                "free; give it more (docker run --shm-size), or take weight_sync=disk"
            )
        return SharedTensors(tensors, self._device)

    def _check_near(self, urls: Sequence[str]) -> None:
        for url in urls:
            if not is_loopback(urlsplit(url).hostname or ""):
                raise UserError(
                    f"{self._key} reaches servers of this machine only, and {url} may be on another; name it by "
                    "127.0.0.1 if it is not, or take weight_sync=distributed, or disk with a sync_folder that both see"
                )


class SharedTensors:
    """Copies of tensors of one dtype in one piece of memory that other processes can map."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | None):
        """`device`: the GPU where they lie; None: the CPU's memory."""
        flat = flatten(list(tensors.values()))
        if device is None:
            with _file_system():
                start_manager()
                flat.share_memory_()
        else:
            flat = flat.to(device)
            torch.cuda.current_stream(device).synchronize()  # other processes read it without waiting for our streams
        self._flat: Tensor | None = flat
        parts = flat.split([value.nbytes for value in tensors.values()])
        self.tensors = {
            name: part.view(value.dtype).reshape(value.shape)
            for (name, value), part in zip(tensors.items(), parts, strict=True)
        }

    def payload(self, readers: int) -> str:
        """Base64 of what `ForkingPickler` makes of `[(name, tensor), …]`.

        Args:
            readers: how many processes will read it.
        """
        data = b""
        for _ in range(readers):  # each of which gives the references of one pickling back
            buffer = io.BytesIO()
            pickler = ForkingPickler(buffer)
            pickler.dispatch_table[Tensor] = _reduce
            with _file_system():
                pickler.dump(list(self.tensors.items()))
            data = buffer.getvalue()
        return base64.b64encode(data).decode()

    def close(self, was_read: bool) -> None:
        """Free the memory.

        Args:
            was_read: everybody has read its payload. The last of all processes to let go removes the file then; torch
                ends a process whose file is gone already. What was not read would keep it for ever.
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


def _reduce(tensor: Tensor) -> Any:
    """As torch does it, but a GPU has the name that is the same in all processes (SGLang reads it; its number depends
    on CUDA_VISIBLE_DEVICES)."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.is_cuda:
        name = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:_DEVICE], name, *arguments[_DEVICE + 1 :])
    return rebuild, arguments


@contextmanager
def _file_system() -> Iterator[None]:
    """Let torch share memory by files. Its other way, by descriptors, needs a parent and its child on both sides."""
    with _strategy:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
