"""The engine for servers (vLLM and SGLang), as the trainer uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.server_group import ServerGroup, make_replicas, pause_mode
from mtrl.engines.server.sync import Weights, WeightSync
from mtrl.engines.server.turns import ServedTurns
from mtrl.engines.server.view import ServersView
from mtrl.types import Generation

CLOSING = 30.0
"""Timeout for each part of the shutdown after the servers have ended, in seconds."""


class EngineClosedError(RuntimeError):
    """The engine was closed."""


def max_in_flight(max_num_seqs: int) -> int:
    """Return the maximum number of turns that are sent to a server which samples `max_num_seqs` at once: a quarter more
    (at least 1), so that the server has the next turn when one ends."""
    return max_num_seqs + max(1, max_num_seqs // 4)


class ServerEngine:
    """See `mtrl.engines.base.Engine`: turns are sampled by servers, each with the whole model.

    A turn that a server does not answer is requested again, on another server if there is one, and counted once.
    Servers that die or hang are restarted and get the newest weights before they get turns. Turns never use prefix
    caches of older weights: every change of weights drops the caches and uses a new salt.
    """

    def __init__(
        self,
        backend: ServerBackend,
        sync: WeightSync,
        *,
        vocabulary: int,
        context: int,
        max_num_seqs: int,
        in_flight: str,
        log_folder: Path,
        devices: Sequence[int] | None = None,
    ):
        """Start the servers and wait until they are ready, or connect to those at `settings.urls`.

        Args:
            vocabulary: size of the vocabulary; the model's token ids are below it.
            context: maximum number of tokens of a whole conversation.
            max_num_seqs: number of turns that one server samples at once; a quarter more (at least 1) are sent.
            in_flight: `continue` or `drain`; `settings.pause_mode` overrides it.
            log_folder: folder of the servers' log files; output is appended.
            devices: indices of the GPUs of all servers, in order; None: there are no GPUs, or every server uses all.

        Raises:
            UserError: a server does not start; the message contains the error of its log.
        """
        self.backend, self.sync = backend, sync
        replicas = make_replicas(backend, log_folder, devices)
        mode = pause_mode(backend, in_flight)
        self.server_group = ServerGroup(backend, sync, replicas, mode, max_in_flight(max_num_seqs), self._give_up)
        self.turns = ServedTurns(backend, self.server_group, vocabulary=vocabulary, context=context)
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Function that receives the error after which no more turns are sampled."""
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        try:
            asyncio.run(self.server_group.start())
        except BaseException:  # such as Ctrl-C, or the end of another rank
            self.server_group.kill()
            raise

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self.turns.version_of(self.server_group.version)

    @version.setter
    def version(self, version: int) -> None:
        """Change the version number of the weights in use."""
        self.turns.renamed[self.server_group.version] = version

    @property
    def stats(self) -> EngineStats:
        """Statistics so far: those of the turns (`ServedTurns.stats`), and in `extra` also `restarts` (of servers),
        `sync_seconds` (of all changes of weights), `sync_bytes` (of the last one, see `WeightSync.sent_bytes`) and
        `replicas` (servers that accept turns)."""
        turns, group = self.turns.stats, self.server_group
        extra = {
            "restarts": group.restarts,
            "sync_seconds": group.sync_seconds,
            "sync_bytes": self.sync.sent_bytes,
            "replicas": len(group.serving),
        }
        return replace(turns, extra={**turns.extra, **{name: float(number) for name, number in extra.items()}})

    @property
    def drains(self) -> bool:
        """Whether new weights wait for the ends of the turns in flight."""
        return self.server_group.drains

    def view(self) -> ServersView:
        """Return what a rollout worker must know to send turns to the servers."""
        return ServersView(self.server_group.views(), dict(self.turns.renamed))

    def open(self, trajectory_id: str) -> None:
        """Do nothing: the engine plans nothing before the first request."""

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `ServedTurns.generate`."""
        self.attach()
        return await self.turns.generate(trajectory_id, prompt, sampling)

    def release(self, trajectory_id: str) -> None:
        self.turns.release(trajectory_id)

    async def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `Engine`; returns when at least one server samples under these weights, and none under others.

        Raises:
            UserError: the weights do not reach the servers, and the servers cannot be restarted.
        """
        task = self.attach().create_task(self._load(weights, version))
        self.turns.outlive(task)
        await asyncio.shield(task)  # a cancelled caller must not leave servers paused

    async def sleep(self) -> None:
        """Make the servers free their GPUs' memory after the turns in flight have ended. New turns wait until `wake`
        and new weights.

        Raises:
            UserError: servers are lost and cannot be restarted.
        """
        self.attach()
        await self.server_group.sleep()

    async def wake(self) -> None:
        """Make the servers allocate their GPUs' memory again; `load_weights` must follow.

        Raises:
            UserError: servers are lost and cannot be restarted.
        """
        self.attach()
        await self.server_group.wake()

    async def probe(self, prompt: list[int], sampling: SamplingParams) -> list[Generation]:
        """See `ServedTurns.probe`."""
        self.attach()
        return await self.turns.probe(prompt, sampling)

    async def close(self) -> None:
        """End the servers, even in the middle of their work, and abort turns in flight. Servers at given URLs keep
        running."""
        self.turns.abort()
        self._give_up(EngineClosedError("the engine is closed"))
        await self.server_group.close()
        await self.turns.close(CLOSING)
        with suppress(Exception):  # the servers may have ended already
            async with asyncio.timeout(CLOSING):
                await self.sync.close()

    def attach(self) -> asyncio.AbstractEventLoop:
        """Use the running event loop from now on, and return it."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self.turns.restart()
            self.server_group.attach()
        return loop

    async def _load(self, weights: Mapping[str, Tensor], version: int) -> None:
        copied = await asyncio.to_thread(Weights.copy, weights, version)
        await self.server_group.load(copied)
        self.turns.renamed.pop(version, None)

    def _give_up(self, error: Exception) -> None:
        """End the use of the engine: all waiting and further requests raise the first such error."""
        self._error = self._error or error
        self.turns.fail(self._error)
        self.server_group.fail(self._error)
        self.on_failure(self._error)
