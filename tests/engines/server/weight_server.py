"""A server in a process of its own that only receives weights. It reads its orders line by line.

`WeightServer` is the trainer's side, with the part of a `ServerApi` that a `WeightSync` needs. A faulty server dies
(`kill`), stops (`stop`), refuses (`refuse`) or loses a bit of its kept weights (`drift`) when it gets the order of a
step. All servers are forks of one process.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import io
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from mtrl.engines.server.changes import TensorChanges, message_size
from mtrl.engines.server.server_api import Rendezvous, ServerRefusedError, ServerUnreachableError, TensorLayout
from tests import forked


class WeightServer:
    def __init__(self, name: str = "127.0.0.1:1", fault: str = "", at: str = "", seconds: float = 20.0):
        self.url = f"http://{name}"
        self.fault, self.at, self.seconds = fault, at, seconds
        self.calls: list[str] = []
        self.bases: list[int | None] = []
        """Version from which the changes of each broadcast started; None: whole tensors."""
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> WeightServer:
        self._reader, self._writer = await asyncio.open_unix_connection(_mother(), limit=2**26)
        self._pid = await self.ask("ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._writer.close()

    async def ask(self, step: str, **values: Any) -> Any:
        self.calls.append(step)
        number, fault = len(self.calls), self.fault if step == self.at else ""
        async with self._lock:
            try:
                order = {"step": step, "ill": fault, "number": number, **values}
                self._writer.write(json.dumps(order).encode() + b"\n")
                async with asyncio.timeout(self.seconds):
                    message: dict[str, Any] = {}
                    while message.get("number") != number:  # answers to cancelled orders come first
                        if not (answer := await self._reader.readline()):
                            raise ConnectionError
                        message = json.loads(answer)
            except TimeoutError:
                raise ServerUnreachableError(f"{self.url}: no answer") from None
            except ConnectionError:
                raise ServerUnreachableError(f"{self.url}: it is gone") from None
        if "error" in message:
            raise ServerRefusedError(f"{self.url}: {message['error']}")
        return message["value"]

    async def state(self) -> tuple[int, str]:
        """Return the version, and the checksum of all weights."""
        version, word = await self.ask("state")
        return version, word

    async def is_alive(self) -> bool:
        if self._lock.locked():
            return False
        try:
            async with asyncio.timeout(2):
                await self.ask("ready")
        except (ServerUnreachableError, TimeoutError):
            return False
        return True

    async def begin_update(self) -> None:
        await self.ask("begin_update")

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        await self.ask("receive_folder", folder=folder, checksum=checksum)

    async def join(self, rendezvous: Rendezvous) -> None:
        await self.ask("join", seconds=self.seconds, **asdict(rendezvous))

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        tensors = [asdict(layout) for layout in layouts]
        await self.ask("receive_broadcast", tensors=tensors, group=group, seconds=self.seconds, checksum=checksum)

    async def check_kept(self, version: int) -> None:
        await self.ask("check_kept", version=version)

    async def receive_changes(
        self, changes: Sequence[TensorChanges], group: str, base: int | None, version: int, checksum: str | None = None
    ) -> None:
        self.bases.append(base)
        tensors, place = [change.to_json() for change in changes], {"group": group, "seconds": self.seconds}
        await self.ask("receive_changes", tensors=tensors, base=base, version=version, checksum=checksum, **place)

    async def leave(self, group: str) -> None:
        await self.ask("leave", group=group)

    async def receive_tensors(self, payloads: Sequence[str], version: int, checksum: str | None = None) -> None:
        await self.ask("receive_tensors", payloads=payloads, checksum=checksum)

    async def end_update(self, version: int) -> None:
        await self.ask("end_update", version=version)

    async def load_adapter(self, name: str, folder: str) -> None:
        await self.ask("load_adapter", name=name, folder=folder)


class Cast:
    """A `WeightExport` of any weights."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def __call__(self, trained: Any) -> Any:
        import torch

        from mtrl.engines.server.export import in_precision

        return ((name, in_precision(value, getattr(torch, self.dtype))) for name, value in trained.items())


class Weights:
    """The state of the process of a server."""

    def __init__(self) -> None:
        from mtrl.engines.vllm.kept import KeptWeights

        self.version, self.tensors, self.groups, self.kept = 0, {}, {}, KeptWeights()

    def drift(self) -> None:
        """Change one bit of the kept weights."""
        import torch

        next(value for value in self.kept.tensors.values() if value.numel()).view(torch.uint8).view(-1)[0] ^= 1

    def fail(self) -> None:
        """Forget the kept weights, as a worker does whose update has failed."""
        from mtrl.engines.vllm.kept import KeptWeights

        self.kept = KeptWeights()

    def take(self, tensors: Any, expected: str | None) -> None:
        from mtrl.engines.server.checksum import checksum

        if checksum(tensors) != expected:
            raise ValueError("another checksum")
        self.tensors |= {name: value.clone() for name, value in tensors.items()}

    def do(self, step: str, order: dict[str, Any]) -> Any:
        from mtrl.distributed import broadcast
        from mtrl.engines.server.checksum import checksum

        match step:
            case "begin_update":
                self.tensors = {}
                self.kept.begin()
            case "check_kept":
                self.kept.check(order["version"])
            case "receive_folder":
                from safetensors.torch import load_file

                files = sorted(Path(order["folder"]).glob("*.safetensors"))
                self.take({name: value for file in files for name, value in load_file(file).items()}, order["checksum"])
            case "join":
                place = [
                    order[key] for key in ("backend", "host", "port", "world_size", "rank_offset", "name", "seconds")
                ]
                self.groups[order["name"]] = broadcast.join_group(*place)
            case "receive_broadcast":
                layouts = order["tensors"]
                group, names = self.groups[order["group"]], [layout["name"] for layout in layouts]
                dtypes, shapes = [layout["dtype"] for layout in layouts], [layout["shape"] for layout in layouts]
                came = broadcast.receive(group, dtypes, shapes, "cpu", order["seconds"])
                self.take(dict(zip(names, came, strict=True)), order["checksum"])
            case "receive_changes":
                changes = [TensorChanges.from_json(values) for values in order["tensors"]]
                group, shapes = self.groups[order["group"]], [[message_size(changes)]]
                (message,) = broadcast.receive(group, ["uint8"], shapes, "cpu", order["seconds"])
                self.take(self.kept.apply(changes, message, order["base"], order["version"]), order["checksum"])
            case "leave":
                if group := self.groups.pop(order["group"], None):
                    broadcast.leave(group)
            case "receive_tensors":
                for payload in order["payloads"]:  # one worker per payload
                    self.take(dict(pickle.load(io.BytesIO(base64.b64decode(payload)))), order["checksum"])
            case "load_adapter":
                return sorted(path.name for path in Path(order["folder"]).iterdir())
            case "end_update":
                self.version = order["version"]
                self.kept.finish()
            case "ready":
                return os.getpid()
            case "state":
                return self.version, checksum(self.tensors)
        return None


def serve(connection: socket.socket) -> None:
    """Execute orders until the trainer has disconnected."""
    weights, stream = Weights(), connection.makefile("rw")
    for line in stream:
        order = json.loads(line)
        match order["ill"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "drift":
                weights.drift()
        try:
            if order["ill"] == "refuse":
                raise ValueError("I refuse")
            answer = {"value": weights.do(order["step"], order)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            if order["step"] != "check_kept":
                weights.fail()
        stream.write(json.dumps({"number": order["number"], **answer}) + "\n")
        stream.flush()


def main(path: str) -> None:
    """Fork a server for every connection, until stdin is closed."""
    import mtrl.distributed.broadcast
    import mtrl.engines.server.checksum
    import mtrl.engines.vllm.kept  # noqa: F401 - what every fork needs

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection)
                os._exit(0)
            connection.close()


@lru_cache(maxsize=1)
def _mother() -> str:
    """Start the process that forks, which ends with this process, and return its address."""
    path = str(Path(tempfile.mkdtemp()) / "socket")
    process = forked.Popen([sys.executable, __file__, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(shutil.rmtree, Path(path).parent, ignore_errors=True)
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return path


if __name__ == "__main__":
    main(sys.argv[1])
