"""The interface of a server. One class per engine implements it with that engine's HTTP API (`vllm/vllm_api.py`,
`sglang/sglang_api.py`); all other code for servers is the same for all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mtrl.engines.base import SamplingParams
from mtrl.types import Generation

if TYPE_CHECKING:
    from mtrl.engines.server.changes import TensorChanges


class ServerError(RuntimeError):
    """A request to a server failed. The message contains that of the server. A retry may succeed."""


class ServerUnreachableError(ServerError):
    """The server gave no answer: no process listens, the connection broke, or the request timed out."""


class ServerBusyError(ServerError):
    """The server is overloaded (429, 503); a later retry can succeed."""


class ServerRefusedError(ServerError):
    """The server reports that the request is wrong (4xx); no retry can succeed, neither here nor on another server."""


@dataclass(frozen=True)
class TurnRequest:
    """A request for one turn to a server."""

    request_id: str
    """Unique id of the request; never used twice."""
    prompt: Sequence[int]
    """Token ids, each below the size of the vocabulary."""
    sampling: SamplingParams
    max_tokens: int
    """Maximum number of tokens to sample; they fit the context after the prompt."""
    cache_salt: str | None = None
    """Salt of the prefix cache: prompts share cached keys and values only if their salts are equal."""
    adapter: str | None = None
    """Name of the loaded adapter that samples the turn; None: the model itself."""


@dataclass(frozen=True)
class TensorLayout:
    """Name, dtype and shape of a tensor that is about to be sent."""

    name: str
    dtype: str
    """Name of the dtype in torch: `float32`, `bfloat16`, …"""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rendezvous:
    """Parameters of the process group in which the trainer (rank 0) broadcasts weights to the workers of servers."""

    host: str
    port: int
    world_size: int
    """Number of processes: the trainer and all workers of all servers."""
    rank_offset: int
    """Rank of this server's first worker."""
    backend: str
    """Backend of the group: gloo | nccl"""
    name: str
    """Name of the group; every group has a new one."""


class ServerApi(Protocol):
    """One server. Every call has a timeout from the settings and raises `ServerError` or one of its subclasses.

    An update is `pause`, then `begin_update`, any number of `receive_…` calls, `end_update`, then `resume`. Versions
    are integers here, whatever their format on the server.
    """

    url: str
    pause_modes: Mapping[str, str]
    """Values of `async_config.in_flight` and `generator.<engine>.pause_mode` -> pause mode that is sent to the server.
    Always has `continue` and `drain`."""

    async def is_alive(self) -> bool:
        """Whether the server answers, within a few seconds; also while it is paused or loads weights."""

    async def is_ready(self) -> bool:
        """Whether the server can sample; False while it still starts."""

    async def generate(self, request: TurnRequest) -> Generation:
        """Sample one turn; return every token with its log-prob, at the sampling temperature, and its policy version.

        `finish` is ABORT where the server ended the request early (`abort`, some pauses); the generation then has the
        tokens that were sampled so far. Cancelling the call aborts the request on the server.
        """

    async def abort(self, request_id: str) -> None:
        """End this request if it is still open; its `generate` returns the tokens that were sampled."""

    async def pause(self, mode: str) -> None:
        """Stop sampling, and return when it has stopped. `mode` is one of `pause_modes`. Requests that arrive during
        the pause wait."""

    async def resume(self) -> None:
        """End the pause."""

    async def begin_update(self) -> None:
        """Begin an update: calls that send weights follow."""

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        """Load the safetensors files in `folder`, a Hugging Face folder that the server can read.

        Args:
            checksum: checksum of the tensors (`server/checksum.py`), here and below; compared where the engine
                supports it.
        """

    async def join(self, rendezvous: Rendezvous) -> None:
        """Make the server's workers join the group, and return when all members have joined. The trainer must join
        concurrently."""

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        """Receive these tensors, in this order, as one broadcast of bytes from rank 0 of the group
        (`mtrl/distributed/broadcast.py`), and return when they have arrived."""

    async def check_kept(self, version: int) -> None:
        """Check that the server's workers keep the weights of this policy version, to which changes can be applied.

        Raises:
            ServerError: a worker keeps other weights or none, or the engine cannot apply changes.
        """

    async def receive_changes(
        self,
        changes: Sequence[TensorChanges],
        group: str,
        base: int | None,
        version: int,
        checksum: str | None = None,
    ) -> None:
        """Receive the changes of these tensors as one broadcast like `receive_broadcast`, load the new tensors, and
        keep them for the next changes.

        Args:
            base: policy version that the changes start from; None: all tensors are sent whole.
            checksum: checksum of the whole new tensors.
        """

    async def leave(self, group: str) -> None:
        """Leave the group."""

    async def receive_tensors(self, payloads: Sequence[str], version: int, checksum: str | None = None) -> None:
        """Read tensors from memory that both processes can map.

        Args:
            payloads: for each worker of the server, by rank, base64 of its own `ForkingPickler` output for
                `[(name, tensor), …]`.
        """

    async def end_update(self, version: int) -> None:
        """End an update: the weights are complete, and are policy `version` from now on."""

    async def drop_cache(self) -> None:
        """Drop every cached key and value, so that no token attends to those of older weights.

        Raises:
            ServerError: the server did not drop them.
        """

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter (a folder of peft) under a new name."""

    async def drop_adapter(self, name: str) -> None:
        """Unload the adapter of this name."""

    async def version(self) -> int:
        """Policy version of the weights, as the server itself reports it."""

    async def sleep(self) -> None:
        """Free the GPU's memory, weights included; no turn may be sampled until `wake` and new weights. With
        `lora=adapter` the server moves its base weights to main memory, since only adapters are sent to it."""

    async def wake(self) -> None:
        """Allocate the GPU's memory again."""

    async def close(self) -> None:
        """Close the client's connections; the server keeps running."""


Json = dict[str, Any]
