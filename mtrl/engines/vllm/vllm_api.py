"""vLLM's HTTP API (0.32) as a `mtrl.engines.server.server_api.ServerApi`.

Turns are requested from `/inference/v1/generate` (`--enable-scale-out`); most other requests go to routes of vLLM's
development mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.server.http import Http
from mtrl.engines.server.server_api import Json, Rendezvous, ServerError, ServerRefusedError, TensorLayout, TurnRequest
from mtrl.types import FinishReason, Generation

if TYPE_CHECKING:
    from mtrl.engines.server.changes import TensorChanges

INITIAL_VERSION = "default"
"""vLLM's weight version of the weights that it was started with."""
NO_NUMBER = -9999.0
"""Value that vLLM returns in place of a log-prob that is NaN or minus infinity."""
SHORT_TIMEOUT = 5.0
"""Timeout of a health check, in seconds."""
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
SEEDS = 2**63


class VllmApi:
    """See `mtrl.engines.server.server_api.ServerApi`."""

    pause_modes: ClassVar[Mapping[str, str]] = {
        "continue": "keep",
        "drain": "wait",
        "keep": "keep",
        "wait": "wait",
        "abort": "abort",
    }

    def __init__(self, url: str, token: str | None, settings: ServerConfig, http: Http | None = None):
        """`http`: client for the requests; None: a new one for `url` and `token`."""
        self.url = url
        self._http = http or Http(url, token)
        self._settings = settings

    # -- turns -------------------------------------------------------------------------------------------------------

    async def is_alive(self) -> bool:
        try:
            return await self.is_ready()
        except ServerRefusedError:
            return False

    async def is_ready(self) -> bool:
        """Whether the server answers: vLLM listens only after its model is loaded.

        Raises:
            ServerRefusedError: the server rejects the token.
        """
        try:
            await self._http.request("GET", "/health", seconds=SHORT_TIMEOUT)
        except ServerRefusedError:
            raise
        except ServerError:
            return False
        return True

    async def generate(self, request: TurnRequest) -> Generation:
        answer = await self._http.request(
            "POST", "/inference/v1/generate", turn_body(request), seconds=self._settings.request_timeout
        )
        try:
            return read_turn(answer)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ServerError(f"{self.url}: the answer is not a turn ({type(error).__name__}: {error})") from None

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_requests", abort_body(request_id))

    async def pause(self, mode: str) -> None:
        vllm_mode = self.pause_modes[mode]
        # `wait` returns only when all running turns have ended.
        seconds = self._settings.request_timeout if vllm_mode == "wait" else self._settings.sync_timeout
        await self._http.request("POST", "/pause", params={"mode": vllm_mode, "clear_cache": "false"}, seconds=seconds)

    async def resume(self) -> None:
        await self._post("/resume")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        try:
            await self._post("/start_weight_update")
        except ServerError:  # a trainer that has ended may have left an update open
            with suppress(ServerError):
                await self._update("abandon", "another update begins")
            await self._post("/start_weight_update")

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        """`checksum`: the trainer's checksum of all tensors in the folder; the server compares it with its own."""
        await self._update("folder", folder, checksum)

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._post("/init_weight_transfer_engine", group_body(rendezvous, self._settings.sync_timeout))

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        """`checksum`: as for `receive_folder`, over these tensors."""
        await self._update("broadcast", broadcast_value(layouts, group), checksum)

    async def check_kept(self, version: int) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": {"kept": version}})

    async def receive_changes(
        self,
        changes: Sequence[TensorChanges],
        group: str,
        base: int | None,
        version: int,
        checksum: str | None = None,
    ) -> None:
        await self._update("changes", changes_value(changes, group, base, version), checksum)

    async def leave(self, group: str) -> None:
        await self._post("/init_weight_transfer_engine", {"init_info": {"leave": group}})

    async def receive_tensors(self, payloads: Sequence[str], version: int, checksum: str | None = None) -> None:
        """`checksum`: as for `receive_folder`, over these tensors."""
        await self._update("tensors", list(payloads), checksum)

    async def end_update(self, version: int) -> None:
        """
        Raises:
            ServerError: some weights did not arrive; the message contains their names.
        """
        await self._update("check", None)  # a separate step: after a failed finish, no update could begin again
        await self._post("/finish_weight_update", {"weight_version": str(version)})

    async def drop_cache(self) -> None:
        """Drop the cache. The keys and values of paused turns are dropped as well and computed again, because vLLM
        drops nothing while turns hold some."""
        answer = await self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(f"{self.url} did not drop its cached keys and values, and reports no reason")

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def drop_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def version(self) -> int:
        answer = await self._http.request("GET", "/weight_info", seconds=self._settings.sync_timeout)
        try:
            return read_version(answer["weight_version"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise ServerError(f"{self.url} reports no policy version ({error})") from None

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        # Level 2 discards the weights. Level 1 moves them to main memory, since adapters need the same base again.
        level = "1" if self._settings.lora == "adapter" else "2"
        await self._post("/sleep", params={"level": level, "mode": "wait"})

    async def wake(self) -> None:
        await self._post("/wake_up")

    async def close(self) -> None:
        await self._http.close()

    async def _post(self, path: str, body: Json | None = None, params: dict[str, str] | None = None) -> Any:
        return await self._http.request("POST", path, body, params=params, seconds=self._settings.sync_timeout)

    async def _update(self, kind: str, value: Any, checksum: str | None = None) -> None:
        await self._post("/update_weights", update_body(kind, value, checksum))


# -- requests --------------------------------------------------------------------------------------------------------


def turn_body(request: TurnRequest) -> Json:
    """Return the body for `/inference/v1/generate`."""
    body: Json = {
        "request_id": request.request_id,
        "token_ids": [int(token) for token in request.prompt],
        "sampling_params": sampling_body(request.sampling, request.max_tokens, len(request.prompt)),
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.adapter is not None:
        body["model"] = request.adapter
    return body


def sampling_body(sampling: SamplingParams, max_tokens: int, prompt_tokens: int) -> Json:
    """Return vLLM's `SamplingParams`. Only the given stop tokens and strings end a turn, not the end token of the
    checkpoint."""
    body: Json = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "logprobs": 0,  # only the log-prob of the sampled token; `flat_logprobs` gives the same answer, no faster
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        body |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    if sampling.temperature > 0:
        body["seed"] = turn_seed(sampling.seed, prompt_tokens)
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
    return body


def turn_seed(seed: int, prompt_tokens: int) -> int:
    """Return the seed of a turn. vLLM restarts its random stream with every request, so that with one seed all turns of
    a trajectory would draw the same numbers."""
    digest = blake2b(f"{seed}:{prompt_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS


def abort_body(request_id: str) -> Json:
    """Return the body for `/abort_requests`. vLLM puts a prefix before the request ids of `/inference/v1/generate`."""
    return {"request_ids": [f"generate-tokens-{request_id}"]}


def group_body(rendezvous: Rendezvous, seconds: float) -> Json:
    """Return the body for `/init_weight_transfer_engine`; see `receiver.GroupInfo`."""
    place = {
        "backend": rendezvous.backend,
        "host": rendezvous.host,
        "port": rendezvous.port,
        "world_size": rendezvous.world_size,
        "rank_offset": rendezvous.rank_offset,
        "name": rendezvous.name,
        "seconds": seconds,
    }
    return {"init_info": {"join": place}}


def broadcast_value(layouts: Sequence[TensorLayout], group: str) -> Json:
    """Return the value of `update_body` for a broadcast."""
    tensors = [{"name": layout.name, "dtype": layout.dtype, "shape": list(layout.shape)} for layout in layouts]
    return {"group": group, "tensors": tensors}


def changes_value(changes: Sequence[TensorChanges], group: str, base: int | None, version: int) -> Json:
    """Return the value of `update_body` for a broadcast of changes."""
    return {"group": group, "base": base, "version": version, "tensors": [change.to_json() for change in changes]}


def update_body(kind: str, value: Any, checksum: str | None = None) -> Json:
    """Return the body for `/update_weights`; see `receiver.Step`."""
    return {"update_info": {"kind": kind, "value": value, "checksum": checksum}}


# -- answers ---------------------------------------------------------------------------------------------------------


def read_turn(answer: Any) -> Generation:
    """Parse the answer of `/inference/v1/generate`.

    Raises:
        LookupError, TypeError, ValueError, AttributeError, OverflowError: the answer is not a turn.
    """
    choice = answer["choices"][0]
    logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"] or {}).get("content") or ()]
    if not all(math.isfinite(logprob) and logprob > NO_NUMBER for logprob in logprobs):
        raise ValueError("a log-prob is not a finite number: the weights may hold NaN or infinity")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Generation(
        token_ids=[int(token) for token in choice["token_ids"] or ()],
        logprobs=logprobs,
        finish=FINISH[choice["finish_reason"]],
        version_spans=[
            (read_version(span["version"]), int(span["end"]) - int(span["start"]))
            for span in choice["weight_versions"] or ()
        ],
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def read_version(version: Any) -> int:
    """Return the policy version for vLLM's name of its weights.

    Raises:
        TypeError, ValueError: the name is not a policy version.
    """
    return 0 if version == INITIAL_VERSION else int(version)
