"""SGLang's HTTP API (0.5.23) as a `ServerApi`.

Properties of this API: `/health` generates a token, so it hangs while the server is paused. Requests are aborted by a
prefix of their name. Weights are sent within a session (`/begin_weight_update`), except from a folder. The cache is not
flushed while a request runs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.server.http import Http
from mtrl.engines.server.server_api import (
    Json,
    Rendezvous,
    ServerError,
    ServerRefusedError,
    ServerUnreachableError,
    TensorLayout,
    TurnRequest,
)
from mtrl.engines.sglang import bodies
from mtrl.engines.sglang.gate import TurnGate
from mtrl.types import FinishReason, Generation

if TYPE_CHECKING:
    from mtrl.engines.server.changes import TensorChanges

SHORT_TIMEOUT = 5.0
"""Timeout of short requests, such as health checks, in seconds."""
ABORT_GRACE = 5.0
"""Seconds to wait for the answer of an aborted turn; then its connection is closed, which ends the turn as well."""
SEEDED = "enable-deterministic-inference"
"""Argument without which SGLang has no separate random stream per request. It needs a GPU."""
WAIT = "wait"
"""Pause mode that SGLang does not have: running turns end, and the client delays new ones."""


@dataclass
class _PendingTurn:
    """A turn in flight."""

    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    is_sent: bool = False


class SglangApi:
    """See `ServerApi`.

    The client delays new turns while the server is paused, because the server does not abort requests that wait for
    the end of its pause. The server samples turns from its own random stream: `sampling.seed` has an effect only with
    `--enable-deterministic-inference`, which CPUs do not support.
    """

    pause_modes: ClassVar[Mapping[str, str]] = {
        "continue": "retract",
        "drain": WAIT,
        "retract": "retract",
        "in_place": "in_place",
        "abort": "abort",
        WAIT: WAIT,
    }
    """Pause mode of `ServerApi.pause_modes` -> mode of SGLang. retract: running turns give up their keys and values,
    which are computed again under the new weights. in_place: running turns keep their old keys and values. abort:
    running turns end with the tokens sampled so far. wait: running turns end first."""

    def __init__(self, url: str, token: str | None, settings: ServerConfig, http: Http | None = None):
        """`http`: client for the requests; None: a new one for `url` and `token`."""
        self.url = url.rstrip("/")
        self._http = http or Http(url, token)
        self._settings = settings
        self._has_seeds = any(
            value and name.lstrip("-").replace("_", "-") == SEEDED for name, value in settings.args.items()
        )
        self._gate = TurnGate()
        self._pending: dict[str, _PendingTurn] = {}
        self._in_session = False
        self._is_asleep = False
        self._background: set[asyncio.Future[Any]] = set()

    # -- state -------------------------------------------------------------------------------------------------------

    async def is_alive(self) -> bool:
        """Request `/ping`: a server that is loading weights answers it, unlike `/health`."""
        try:
            await self._http.request("GET", "/ping", seconds=SHORT_TIMEOUT)
        except ServerUnreachableError:
            return False
        except ServerError:
            return True
        return True

    async def is_ready(self) -> bool:
        """
        Raises:
            ServerRefusedError: the server rejects our token.
        """
        try:
            await self._http.request(
                "GET", "/model_info", seconds=SHORT_TIMEOUT
            )  # unlike /ready, it requires the token
            await self._http.request("GET", "/ready", seconds=SHORT_TIMEOUT)
        except ServerRefusedError:
            raise
        except ServerError:
            return False
        return True

    async def version(self) -> int:
        answer = await self._http.request("GET", "/model_info", seconds=SHORT_TIMEOUT)
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        return bodies.read_version(version, self.url)

    async def waiting(self) -> tuple[int, int]:
        """Return the numbers of running and waiting requests."""
        answer = await self._http.request("GET", "/v1/loads", seconds=SHORT_TIMEOUT, params={"include": "core"})
        return bodies.read_loads(answer, self.url)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Generation:
        # SGLang aborts by prefix. With its length in front, no name is a prefix of another.
        pending = _PendingTurn(f"{len(request.request_id)}:{request.request_id}")
        self._pending[request.request_id] = pending
        turn = asyncio.ensure_future(self._sample(request, pending))
        end = asyncio.ensure_future(self._abort_expired(pending))
        try:
            await asyncio.wait({turn, end}, return_when=asyncio.FIRST_COMPLETED)
            return turn.result() if turn.done() else Generation([], [], FinishReason.ABORT, [])
        finally:
            del self._pending[request.request_id]
            end.cancel()
            if not turn.done():
                turn.cancel()
                if pending.is_sent:
                    self._run_in_background(self._abort(pending.rid))

    async def abort(self, request_id: str) -> None:
        pending = self._pending.get(request_id)
        if pending is None:
            return
        pending.aborted.set()
        if pending.is_sent:
            await self._abort(pending.rid)

    async def _sample(self, request: TurnRequest, pending: _PendingTurn) -> Generation:
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._gate.enter()
        except TimeoutError:
            raise ServerUnreachableError(f"{self.url} was paused for {seconds:g} s") from None
        try:
            pending.is_sent = True
            seed = turn_seed(request) if self._has_seeds else None
            body = bodies.turn_body(request, pending.rid, seed)
            answer = await self._http.request("POST", "/generate", body, seconds=seconds)
            return bodies.read_turn(answer, self.url, request.sampling.stop)
        finally:
            self._gate.leave()

    async def _abort_expired(self, pending: _PendingTurn) -> None:
        """Return when a turn was aborted and its answer need no longer be waited for."""
        await pending.aborted.wait()
        if pending.is_sent:
            await self._gate.opened()  # a turn that a pause has frozen is answered after the pause
            await asyncio.sleep(ABORT_GRACE)

    async def _abort(self, rid: str) -> None:
        await self._http.request("POST", "/abort_request", {"rid": rid}, seconds=SHORT_TIMEOUT)

    # -- pauses ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        sglang_mode = self.pause_modes[mode]
        self._gate.shut()
        try:
            if sglang_mode == WAIT:
                await self._drain()
                sglang_mode = "abort"  # no turn of this client is left
            await self._post("/pause_generation", {"mode": sglang_mode})
        except BaseException:
            self._gate.open()
            raise

    async def resume(self) -> None:
        await self._post("/continue_generation", {})
        self._gate.open()

    async def _drain(self) -> None:
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._gate.emptied()
        except TimeoutError:
            raise ServerUnreachableError(f"{self.url}: turns had not ended after {seconds:g} s") from None

    async def drop_cache(self) -> None:
        """Flush the cache. While a pause holds turns frozen (`in_place`), the server drops nothing."""
        await self._post("/flush_cache")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Do nothing: the session begins with the first tensors that are not sent by a folder."""

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        await self._post("/update_weights_from_disk", bodies.folder_body(folder))

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._post("/init_weights_update_group", bodies.rendezvous_body(rendezvous))

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        await self._open_session()
        await self._post("/update_weights_from_distributed", bodies.broadcast_body(layouts, group))

    async def check_kept(self, version: int) -> None:
        raise ServerRefusedError("SGLang loads whole tensors, and keeps none to which changes can be applied")

    async def receive_changes(
        self,
        changes: Sequence[TensorChanges],
        group: str,
        base: int | None,
        version: int,
        checksum: str | None = None,
    ) -> None:
        raise ServerRefusedError("SGLang loads whole tensors, and no changes of them")

    async def leave(self, group: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group})

    async def receive_tensors(self, payloads: Sequence[str], version: int, checksum: str | None = None) -> None:
        await self._open_session()
        await self._post("/update_weights_from_tensor", bodies.tensor_body(payloads))

    async def end_update(self, version: int) -> None:
        if self._in_session:
            self._in_session = False
            await self._post("/end_weight_update", {})
        await self._post("/update_weight_version", bodies.version_body(version))

    async def _open_session(self) -> None:
        if self._in_session:
            return
        try:
            await self._post("/begin_weight_update", {})
        except ServerRefusedError as error:
            if "HTTP 404" in str(error):  # servers before 0.5.21 have no sessions
                return
            # A failed update may have left its session open.
            await self._post("/end_weight_update", {})
            await self._post("/begin_weight_update", {})
        self._in_session = True

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def drop_adapter(self, name: str) -> None:
        """Unload the adapter after its turns have ended. A later request by its name loads it again if its folder
        exists."""
        seconds = self._settings.sync_timeout + self._settings.request_timeout
        await self._http.request("POST", "/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """
        Raises:
            ServerError: a request runs or waits; SGLang would end itself in this case.
        """
        running, waiting = await self.waiting()
        if running or waiting:
            raise ServerError(f"{self.url} cannot sleep: {running} requests run, and {waiting} wait")
        await self._post("/release_memory_occupation", {})
        self._is_asleep = True

    async def wake(self) -> None:
        """Do nothing if the server is awake: SGLang would end itself."""
        if self._is_asleep:
            await self._post("/resume_memory_occupation", {})
            self._is_asleep = False

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._http.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: Json | None = None) -> None:
        """Send one of the slow requests whose answers hold no data."""
        await self._http.request("POST", path, body, seconds=self._settings.sync_timeout)

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; its failure is ignored."""
        task = asyncio.ensure_future(asyncio.gather(coroutine, return_exceptions=True))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def turn_seed(request: TurnRequest) -> int:
    """Return the seed of this turn. With the trajectory's seed, every turn would draw the same numbers."""
    name = f"{request.sampling.seed}:{len(request.prompt)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
