"""A process that receives weights as the worker of a server does, and the part of `ServerApi` that a sync calls."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.distributed import broadcast
from mtrl.engines.server.changes import TensorChanges, message_size
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.server_api import Rendezvous, ServerError, TensorLayout
from mtrl.engines.vllm.kept import KeptWeights
from mtrl.engines.vllm.payload import unpack

SECONDS = 60.0
"""Time limit of each step, in seconds."""


class ReceiverProcess:
    """The trainer's side: it passes each step of an update to the process."""

    url = "http://127.0.0.1:1"

    def __init__(self, device: str):
        """`device`: device of the received tensors."""
        context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, device), daemon=True)
        self._process.start()
        other.close()

    async def is_alive(self) -> bool:
        return self._process.is_alive()

    async def begin_update(self) -> None:
        await self._ask("begin")

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        await self._ask("folder", folder, checksum)

    async def receive_tensors(self, payloads: Sequence[str], version: int, checksum: str | None = None) -> None:
        await self._ask("tensors", payloads[0], checksum)

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._ask("join", asdict(rendezvous))

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        await self._ask("broadcast", (group, [asdict(layout) for layout in layouts]), checksum)

    async def check_kept(self, version: int) -> None:
        await self._ask("check_kept", version)

    async def receive_changes(
        self, changes: Sequence[TensorChanges], group: str, base: int | None, version: int, checksum: str | None = None
    ) -> None:
        await self._ask("changes", (group, list(changes), base, version), checksum)

    async def leave(self, group: str) -> None:
        await self._ask("leave", group)

    async def end_update(self, version: int) -> None:
        await self._ask("end")

    async def received(self) -> str:
        """Return the checksum of all weights of the last update."""
        return await self._ask("checksum")

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    async def _ask(self, step: str, *values: Any) -> Any:
        answer, error = await asyncio.to_thread(self._exchange, step, values)
        if error:
            raise ServerError(error)
        return answer

    def _exchange(self, step: str, values: tuple[Any, ...]) -> tuple[Any, str]:
        try:
            self._connection.send((step, *values))
            return self._connection.recv()
        except (EOFError, OSError):
            return None, f"the receiving process has ended with {self._process.exitcode}"


def _serve(connection: Connection, device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    worker = _Worker(device)
    while True:
        step, *values = connection.recv()
        try:
            connection.send((getattr(worker, step)(*values), ""))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


class _Worker:
    """The weights of one update. Its methods are the steps."""

    def __init__(self, device: str):
        self._device = device
        self._weights: dict[str, Tensor] = {}
        self._groups: dict[str, broadcast.GroupMembership] = {}
        self._kept = KeptWeights()

    def begin(self) -> None:
        self._weights = {}
        self._kept.begin()

    def end(self) -> None:
        self._kept.finish()

    def check_kept(self, version: int) -> None:
        self._kept.check(version)

    def folder(self, folder: str, digest: str | None) -> None:
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        self._take({name: value for file in files for name, value in load_file(file).items()}, digest)

    def tensors(self, payload: str, digest: str | None) -> None:
        self._take(unpack(payload), digest)

    def join(self, where: dict[str, Any]) -> None:
        self._groups[where["name"]] = broadcast.join_group(
            where["backend"], where["host"], where["port"], where["world_size"], where["rank_offset"], where["name"],
            SECONDS,
        )  # fmt: skip

    def broadcast(self, value: tuple[str, list[dict[str, Any]]], digest: str | None) -> None:
        name, layouts = value
        dtypes, shapes = ([layout[key] for layout in layouts] for key in ("dtype", "shape"))
        tensors = broadcast.receive(self._groups[name], dtypes, shapes, self._device, SECONDS)
        self._take({layout["name"]: tensor for layout, tensor in zip(layouts, tensors, strict=True)}, digest)

    def changes(self, value: tuple[str, list[TensorChanges], int | None, int], digest: str | None) -> None:
        name, changes, base, version = value
        shapes = [[message_size(changes)]]
        (message,) = broadcast.receive(self._groups[name], ["uint8"], shapes, self._device, SECONDS)
        new = self._kept.apply(changes, message.cpu(), base, version)
        self._take({name: value.to(self._device) for name, value in new.items()}, digest)

    def leave(self, name: str) -> None:
        if name in self._groups:
            broadcast.leave(self._groups.pop(name))

    def checksum(self) -> str:
        return checksum(self._weights)

    def _take(self, weights: dict[str, Tensor], digest: str | None) -> None:
        if digest is not None and checksum(weights) != digest:
            raise ValueError(f"{len(weights)} tensors have another checksum than the trainer's")
        self._weights |= {name: value.clone() for name, value in weights.items()}
