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
from typing import Any, ClassVar

from mtrl.config.engine_schema import ServerConfig
from mtrl.engines.base import Generation
from mtrl.engines.server.api import (
    Json,
    Rendezvous,
    ServerError,
    ServerGoneError,
    ServerRefusedError,
    TensorLayout,
    TurnRequest,
)
from mtrl.engines.server.http import Http
from mtrl.engines.sglang import words
from mtrl.engines.sglang.gate import Gate
from mtrl.types import FinishReason

LOOK = 5.0
"""Timeout of short requests, such as health checks, in seconds."""
PATIENCE = 5.0
"""Seconds to wait for the answer of an aborted turn; then its connection is closed, which ends the turn as well."""
SEEDED = "enable-deterministic-inference"
"""Argument without which SGLang has no separate random stream per request. It needs a GPU."""
WAIT = "wait"
"""Pause mode that SGLang does not have: running turns end, and new ones are held back on the client's side."""


@dataclass
class _Asked:
    """A turn in flight."""

    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    is_sent: bool = False


class SglangApi:
    """See `ServerApi`.

    The client holds new turns back while the server is paused, because the server does not abort requests that wait for
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

    def __init__(self, url: str, token: str | None, settings: ServerConfig):
        self.url = url.rstrip("/")
        self._http = Http(url, token)
        self._settings = settings
        self._has_seeds = any(
            value and name.lstrip("-").replace("_", "-") == SEEDED for name, value in settings.args.items()
        )
        self._gate = Gate()
        self._asked: dict[str, _Asked] = {}
        self._in_session = False
        self._is_asleep = False
        self._errands: set[asyncio.Future[Any]] = set()

    # -- state -------------------------------------------------------------------------------------------------------

    async def is_alive(self) -> bool:
        """Request `/ping`: a server that is loading weights answers it, unlike `/health`."""
        try:
            await self._http.ask("GET", "/ping", seconds=LOOK)
        except ServerGoneError:
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
            await self._http.ask("GET", "/model_info", seconds=LOOK)  # unlike /ready, it requires the token
            await self._http.ask("GET", "/ready", seconds=LOOK)
        except ServerRefusedError:
            raise
        except ServerError:
            return False
        return True

    async def version(self) -> int:
        answer = await self._http.ask("GET", "/model_info", seconds=LOOK)
        said = answer.get("weight_version") if isinstance(answer, dict) else None
        return words.read_version(said, self.url)

    async def waiting(self) -> tuple[int, int]:
        """Return the numbers of running and waiting requests."""
        answer = await self._http.ask("GET", "/v1/loads", seconds=LOOK, params={"include": "core"})
        return words.read_loads(answer, self.url)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Generation:
        # SGLang aborts by prefix. With its length in front, no name is a prefix of another.
        asked = _Asked(f"{len(request.request_id)}:{request.request_id}")
        self._asked[request.request_id] = asked
        turn = asyncio.ensure_future(self._sample(request, asked))
        end = asyncio.ensure_future(self._given_up(asked))
        try:
            await asyncio.wait({turn, end}, return_when=asyncio.FIRST_COMPLETED)
            return turn.result() if turn.done() else Generation([], [], FinishReason.ABORT, [])
        finally:
            del self._asked[request.request_id]
            end.cancel()
            if not turn.done():
                turn.cancel()
                if asked.is_sent:
                    self._start(self._abort(asked.rid))

    async def abort(self, request_id: str) -> None:
        asked = self._asked.get(request_id)
        if asked is None:
            return
        asked.aborted.set()
        if asked.is_sent:
            await self._abort(asked.rid)

    async def _sample(self, request: TurnRequest, asked: _Asked) -> Generation:
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._gate.enter()
        except TimeoutError:
            raise ServerGoneError(f"{self.url} was paused for {seconds:g} s") from None
        try:
            asked.is_sent = True
            seed = turn_seed(request) if self._has_seeds else None
            body = words.turn_words(request, asked.rid, seed)
            return words.read_turn(await self._http.ask("POST", "/generate", body, seconds=seconds), self.url)
        finally:
            self._gate.leave()

    async def _given_up(self, asked: _Asked) -> None:
        """Return when a turn was aborted and its answer need no longer be waited for."""
        await asked.aborted.wait()
        if asked.is_sent:
            await self._gate.opened()  # a turn that a pause has frozen is answered after the pause
            await asyncio.sleep(PATIENCE)

    async def _abort(self, rid: str) -> None:
        await self._http.ask("POST", "/abort_request", {"rid": rid}, seconds=LOOK)

    # -- pauses ------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        told = self.pause_modes[mode]
        self._gate.shut()
        try:
            if told == WAIT:
                await self._drain()
                told = "abort"  # no turn of this client is left
            await self._tell("/pause_generation", {"mode": told})
        except BaseException:
            self._gate.open()
            raise

    async def resume(self) -> None:
        await self._tell("/continue_generation", {})
        self._gate.open()

    async def _drain(self) -> None:
        seconds = self._settings.request_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._gate.emptied()
        except TimeoutError:
            raise ServerGoneError(f"{self.url}: turns were not over after {seconds:g} s") from None

    async def forget(self) -> None:
        """Flush the cache. While a pause holds turns frozen (`in_place`), the server drops nothing."""
        await self._tell("/flush_cache")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Do nothing: the session begins with the first tensors that are not sent by a folder."""

    async def receive_folder(self, folder: str, version: int, checksum: str | None = None) -> None:
        await self._tell("/update_weights_from_disk", words.folder_words(folder))

    async def join(self, rendezvous: Rendezvous) -> None:
        await self._tell("/init_weights_update_group", words.rendezvous_words(rendezvous))

    async def receive_broadcast(
        self, layouts: Sequence[TensorLayout], group: str, version: int, checksum: str | None = None
    ) -> None:
        await self._open_session()
        await self._tell("/update_weights_from_distributed", words.broadcast_words(layouts, group))

    async def leave(self, group: str) -> None:
        await self._tell("/destroy_weights_update_group", {"group_name": group})

    async def receive_tensors(self, payload: str, version: int, checksum: str | None = None) -> None:
        await self._open_session()
        body = words.tensor_words(payload, self._settings.tensor_parallel_size)
        await self._tell("/update_weights_from_tensor", body)

    async def end_update(self, version: int) -> None:
        if self._in_session:
            self._in_session = False
            await self._tell("/end_weight_update", {})
        await self._tell("/update_weight_version", words.version_words(version))

    async def _open_session(self) -> None:
        if self._in_session:
            return
        try:
            await self._tell("/begin_weight_update", {})
        except ServerRefusedError as error:
            if "HTTP 404" in str(error):  # servers before 0.5.21 have no sessions
                return
            # A failed update may have left its session open.
            await self._tell("/end_weight_update", {})
            await self._tell("/begin_weight_update", {})
        self._in_session = True

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._tell("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def drop_adapter(self, name: str) -> None:
        """Unload the adapter after its turns have ended. A later request by its name loads it again if its folder
        exists."""
        seconds = self._settings.sync_timeout + self._settings.request_timeout
        await self._http.ask("POST", "/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """
        Raises:
            ServerError: a request runs or waits; SGLang would end itself in this case.
        """
        running, waiting = await self.waiting()
        if running or waiting:
            raise ServerError(f"{self.url} cannot sleep: {running} requests run, and {waiting} wait")
        await self._tell("/release_memory_occupation", {})
        self._is_asleep = True

    async def wake(self) -> None:
        """Do nothing if the server is awake: SGLang would end itself."""
        if self._is_asleep:
            await self._tell("/resume_memory_occupation", {})
            self._is_asleep = False

    async def close(self) -> None:
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        await self._http.close()

    # -- helpers ------------------------------------------------------------------------------------------------------

    async def _tell(self, path: str, body: Json | None = None) -> None:
        """Send one of the slow requests whose answers hold no data."""
        await self._http.ask("POST", path, body, seconds=self._settings.sync_timeout)

    def _start(self, errand: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; its failure is ignored."""
        task = asyncio.ensure_future(asyncio.gather(errand, return_exceptions=True))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


def turn_seed(request: TurnRequest) -> int:
    """Return the seed of this turn. With the trajectory's seed, every turn would draw the same numbers."""
    name = f"{request.sampling.seed}:{len(request.prompt)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
