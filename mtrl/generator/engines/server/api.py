"""What a server of an engine understands: one class per engine puts it into that engine's words (`vllm/api.py`,
`sglang/api.py`), and everything else about servers is the same for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtrl.generator.engines.base import Generation, SamplingParams


class ServerError(RuntimeError):
    """A server did not do what it was asked; the sentence holds its own words. To ask again may help."""


class ServerGoneError(ServerError):
    """No answer: nobody listens, the connection broke, or the time limit is over."""


class ServerBusyError(ServerError):
    """It has too much to do (429, 503): to ask again later helps."""


class ServerRefusedError(ServerError):
    """The server says that the request is wrong (4xx): no repetition mends that, here or elsewhere."""


@dataclass(frozen=True)
class TurnRequest:
    """One turn, as a server is asked for it."""

    request_id: str
    """Never used twice."""
    prompt: Sequence[int]
    """Token ids, each below the size of the vocabulary."""
    sampling: SamplingParams
    max_tokens: int
    """At most this many, which fit the context after the prompt."""
    cache_salt: str | None = None
    """Prompts share cached keys and values only where this is the same."""
    adapter: str | None = None
    """Name of the loaded adapter that samples; None: the model itself."""


@dataclass(frozen=True)
class TensorLayout:
    """What a tensor looks like, before its bytes come."""

    name: str
    dtype: str
    """As torch calls it: `float32`, `bfloat16`, …"""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rendezvous:
    """Where the trainer (rank 0) and the workers of servers meet to broadcast weights."""

    host: str
    port: int
    world_size: int
    """The trainer and all workers of all servers."""
    rank_offset: int
    """Rank of this server's first worker."""
    backend: str
    """gloo | nccl"""
    name: str
    """Of the group; a new one for every meeting."""


class ServerApi(Protocol):
    """One server. Every call takes a time limit from the settings and raises `ServerError` or one of its kinds.

    An update is `pause`, then `begin_update`, any number of `receive_…` calls, `end_update`, then `resume`. Versions
    are whole numbers here, whatever the server makes of them.
    """

    url: str
    pause_modes: Mapping[str, str]
    """What `async_config.in_flight` and `generator.<engine>.pause_mode` may say -> what the server is told.
    Always has `continue` and `drain`."""

    async def is_alive(self) -> bool:
        """Whether the server answers, within a few seconds; also while it is paused or loads weights."""

    async def is_ready(self) -> bool:
        """Whether it can sample: false while it still starts."""

    async def generate(self, request: TurnRequest) -> Generation:
        """Sample one turn; every token with its log-prob, at the temperature of sampling, and its policy version.

        `finish` is ABORT with what was sampled so far where the server ended it before (`abort`, some pauses).
        Cancelling the call aborts the request on the server.
        """

    async def abort(self, request_id: str) -> None:
        """End this request, whatever became of it; its `generate` returns what was sampled."""

    async def pause(self, mode: str) -> None:
        """Stop sampling; `mode` is one of `pause_modes`. Requests that come meanwhile wait. Returns when it has."""

    async def resume(self) -> None:
        """Go on."""

    async def begin_update(self) -> None:
        """Weights follow."""

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        """Load the safetensors files in `folder`, a Hugging Face folder that the server sees.

        Args:
            checksum: of the tensors (`server/checksum.py`), here and below; compared where the engine can.
        """

    async def join(self, rendezvous: Rendezvous) -> None:
        """Let its workers meet the trainer; returns when all have come, so it is called beside the trainer's own."""

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        """Receive these tensors, in this order, as one broadcast of bytes from rank 0 of the group
        (`mtrl/distributed/broadcast.py`); returns when it has them."""

    async def leave(self, group: str) -> None:
        """Give the group up."""

    async def receive_tensors(self, payload: str, version: int, checksum: str | None = None) -> None:
        """Take tensors out of memory that both sides see.

        Args:
            payload: base64 of what `ForkingPickler` made of `[(name, tensor), …]`.
        """

    async def end_update(self, version: int) -> None:
        """All weights are there: from now on they are policy `version`."""

    async def forget(self) -> None:
        """Drop every cached key and value, so that nothing is sampled after those of older weights.

        Raises:
            ServerError: it did not.
        """

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter (peft's folder) under a new name."""

    async def drop_adapter(self, name: str) -> None:
        """Give it up."""

    async def version(self) -> int:
        """Policy version of the weights, as the server itself tells."""

    async def sleep(self) -> None:
        """Free the GPU's memory, weights included; nothing may be sampled until `wake` and new weights."""

    async def wake(self) -> None:
        """Take it again."""

    async def close(self) -> None:
        """Close connections; the server goes on."""


Json = dict[str, Any]
