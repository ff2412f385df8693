"""SGLang's HTTP API (0.5.23), as `ServerApi` has it.

What one should know of it: `/health` generates a token, so it hangs while the server is paused; requests are aborted by
the beginning of their name; weights come within a session (`/begin_weight_update`), but from a folder; a cache is not
flushed while something runs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mtrl.config.engine_schema import ServerConfig
from mtrl.generator.engines.base import Generation
from mtrl.generator.engines.server.api import (
    Json,
    Rendezvous,
    ServerError,
    ServerGoneError,
    ServerRefusedError,
    TensorLayout,
    TurnRequest,
)
from mtrl.generator.engines.server.http import Http
from mtrl.generator.engines.sglang import words
from mtrl.generator.engines.sglang.gate import Gate
from mtrl.types import FinishReason

LOOK = 5.0
"""Seconds that a look at the server may take."""
PATIENCE = 5.0
"""Seconds that an aborted turn may take to come back; then its connection is closed, which ends it too."""
SEEDED = "enable-deterministic-inference"
"""The argument without which SGLang has no random stream of a request's own. It needs a GPU."""
WAIT = "wait"
"""The pause mode that SGLang does not have: turns end, and new ones are held back here."""


@dataclass
class _Asked:
    """A turn that is on its way."""

    rid: str
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    is_sent: bool = False


class SglangApi:
    """See `ServerApi`.

    New turns are held back here while the server is paused, and never reach it, for it forgets to abort those that
    wait for its pause to end. A turn of one trajectory is sampled from the server's own random stream: `sampling.seed`
    counts only for servers with `--enable-deterministic-inference`, which CPUs do not have.
    """

    pause_modes: ClassVar[Mapping[str, str]] = {
        "continue": "retract",
        "drain": WAIT,
        "retract": "retract",
        "in_place": "in_place",
        "abort": "abort",
        WAIT: WAIT,
    }
    """retract: running turns give up their keys and values, which are computed anew under the new weights. in_place:
    they go on with the old ones. abort: they end with what they have. wait: they end first."""

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

    # -- how it is ---------------------------------------------------------------------------------------------------

    async def is_alive(self) -> bool:
        """A server that is busy with weights still answers this; `/health` would not."""
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
            ServerRefusedError: it does not take our token.
        """
        try:
            await self._http.ask("GET", "/model_info", seconds=LOOK)  # unlike /ready it asks for the token
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
        """Requests that are being sampled, and that wait."""
        answer = await self._http.ask("GET", "/v1/loads", seconds=LOOK, params={"include": "core"})
        return words.read_loads(answer, self.url)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def generate(self, request: TurnRequest) -> Generation:
        # Names are aborted by their beginning, and with its length before it none is the beginning of another.
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
        """Return when a turn was aborted and nothing need be waited for."""
        await asked.aborted.wait()
        if asked.is_sent:
            await self._gate.opened()  # one that is frozen by a pause comes back afterwards
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
                told = "abort"  # nothing of ours is left
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
        """Turns that a pause holds frozen (`in_place`) keep what they have, and then nothing is dropped."""
        await self._tell("/flush_cache")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """The session begins with the first tensor that comes in another way than by a folder."""

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
            if "HTTP 404" in str(error):  # a server from before 0.5.21, which has none
                return
            # An update that failed has left its own open.
            await self._tell("/end_weight_update", {})
            await self._tell("/begin_weight_update", {})
        self._in_session = True

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._tell("/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def drop_adapter(self, name: str) -> None:
        """Turns that it samples end first. Who asks for it by its name later loads it again, if its folder is there."""
        seconds = self._settings.sync_timeout + self._settings.request_timeout
        await self._http.ask("POST", "/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """
        Raises:
            ServerError: something runs; SGLang would end itself.
        """
        running, waiting = await self.waiting()
        if running or waiting:
            raise ServerError(f"{self.url} cannot sleep: {running} requests run, and {waiting} wait")
        await self._tell("/release_memory_occupation", {})
        self._is_asleep = True

    async def wake(self) -> None:
        """Nothing happens to one that is awake; SGLang would end itself."""
        if self._is_asleep:
            await self._tell("/resume_memory_occupation", {})
            self._is_asleep = False

    async def close(self) -> None:
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        await self._http.close()

    # -- underneath ---------------------------------------------------------------------------------------------------

    async def _tell(self, path: str, body: Json | None = None) -> None:
        """One of the calls that take their time and answer nothing."""
        await self._http.ask("POST", path, body, seconds=self._settings.sync_timeout)

    def _start(self, errand: Coroutine[Any, Any, None]) -> None:
        """Do it on the side; that it fails harms nobody."""
        task = asyncio.ensure_future(asyncio.gather(errand, return_exceptions=True))
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


def turn_seed(request: TurnRequest) -> int:
    """Of this turn: with the trajectory's own seed every turn would draw the same numbers."""
    name = f"{request.sampling.seed}:{len(request.prompt)}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
