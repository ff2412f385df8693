"""The embedded engine in a separate process, which samples turns while this process trains."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.engines.local.block import Block
from mtrl.engines.local.channel import ChannelClosedError
from mtrl.engines.local.child import Child
from mtrl.engines.local.memory import EngineMemory, cannot_start
from mtrl.engines.local.messages import Failed, Generate, Load, Loaded, NewBlock, Open, Ping, Release, TurnAnswer
from mtrl.errors import UserError
from mtrl.types import FinishReason, Generation

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of consecutive deaths of the process, without an answer in between, after which the engine gives up."""


class EngineProcessError(RuntimeError):
    """The engine's process failed, or the engine is closed."""


@dataclass
class _PendingTurn:
    """A turn that has no answer yet."""

    request: Generate
    future: asyncio.Future[Generation]
    released: bool = False

    def abort(self) -> None:
        if not self.future.done():
            self.future.set_result(Generation([], [], FinishReason.ABORT, []))


class ProcessEngine:
    """See `mtrl.engines.base.Engine`: a `LocalEngine` with a copy of the model, in a separate process.

    New weights go through shared memory. The parent writes them there, the child copies them between two tokens and
    confirms, and only then does the parent write again. Requests and answers go through sockets that the event loop
    reads.

    A child that dies, or does not answer for `timeout` seconds, is replaced by a new one with the newest weights, which
    receives the unanswered requests again. A token is a function of seed, position and distribution, so no turn is
    lost; the only change is that such a turn is sampled under the newest weights as a whole.
    """

    def __init__(self, memory: EngineMemory, threads: int = 1, timeout: float = 600.0, gpu: int | None = None):
        """Start the process and wait until its engine is ready.

        Args:
            memory: the model and its settings; several processes may share them.
            threads: number of CPU threads of the process.
            timeout: seconds without an answer after which the process counts as hung.
            gpu: index of the only GPU that the process sees, among those of this process; None: it sees all of them.

        Raises:
            UserError: the engine cannot run the model.
        """
        self._memory, self._threads, self._gpu = memory, threads, gpu
        self.timeout = timeout
        """Seconds without an answer after which the process counts as hung; a change applies from the next check on."""
        self._version = 0
        self.stats = EngineStats()
        self._earlier_stats = self.stats
        """Statistics of all earlier children."""
        self._open: dict[str, None] = {}
        """Ids of open trajectories, in the order of `open`."""
        self._turns: dict[int, _PendingTurn] = {}
        self._sent_block: Block | None = None
        """Block of weights that the child was sent last."""
        self._newest: Load | None = None
        """Message that makes a new child load the newest weights."""
        self._loaded: asyncio.Future[None] | None = None
        """Future that is done when `_newest` is answered."""
        self._loading = False
        """Whether the block may hold other weights than the child uses."""
        self._numbers = itertools.count()
        self._deaths = 0
        self._error: Exception | None = None
        """Error that every further request raises; None while the engine works."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._health_check: asyncio.TimerHandle | None = None
        self._has_answered = True
        """Whether the child sent a message since the last check."""
        self._child = self._new_child()
        self._wait_for_start()

    @property
    def version(self) -> int:
        """Policy version of the weights in use."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        """Change the version number of the weights in use; not allowed while weights are being loaded."""
        assert not self._loading, "weights are being loaded"
        self._version = version
        self._send_load(version)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def open(self, trajectory_id: str) -> None:
        self._open.pop(trajectory_id, None)
        self._open[trajectory_id] = None
        self._child.channel.send(Open(trajectory_id))

    async def generate(self, trajectory_id: str, prompt: list[int], sampling: SamplingParams) -> Generation:
        """See `Engine`.

        Raises:
            UserError: the process died `MAX_DEATHS` times in a row.
            EngineProcessError: the engine failed in the process, or is closed.
        """
        loop = self.attach()
        if trajectory_id not in self._open:
            self.open(trajectory_id)
        pending = _PendingTurn(Generate(next(self._numbers), trajectory_id, prompt, sampling), loop.create_future())
        self._turns[pending.request.number] = pending
        self._child.channel.send(pending.request)
        try:
            return await pending.future
        finally:
            self._turns.pop(pending.request.number, None)

    def release(self, trajectory_id: str) -> None:
        if trajectory_id not in self._open:
            return
        del self._open[trajectory_id]
        for pending in self._turns.values():
            pending.released |= pending.request.trajectory_id == trajectory_id
        self._child.channel.send(Release(trajectory_id))

    async def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Copy these weights to the process, and return when turns are sampled under them as policy `version`.

        Raises:
            UserError: the process died `MAX_DEATHS` times in a row.
            EngineProcessError: the weights do not fit, or the engine is closed.
        """
        loop = self.attach()
        # A caller that is cancelled must not let the next call overwrite weights that the child still reads.
        await asyncio.shield(loop.create_task(self._load(weights, version)))

    async def close(self) -> None:
        """End the process, even in the middle of its work, and abort unanswered turns."""
        self.end()

    def end(self) -> None:
        """Do what `close` does, without an event loop."""
        for pending in self._turns.values():
            pending.abort()
        self._give_up(EngineProcessError("the engine is closed"))
        self._memory.close()

    # -- the child ----------------------------------------------------------------------------------------------------

    def _new_child(self) -> Child:
        child = Child(self._threads, self._gpu)
        child.channel.send_file(self._memory.model.file)
        child.channel.send(self._memory.start)
        self._sent_block = None
        return child

    def _wait_for_start(self) -> None:
        try:
            answer = self._child.channel.wait(self.timeout)
        except ChannelClosedError:
            raise cannot_start(f"it {self._child.end()}") from None
        except TimeoutError as error:
            self._child.end()
            raise cannot_start(str(error)) from None
        except BaseException:  # such as Ctrl-C, or the end of another rank
            self._child.end()
            raise
        if isinstance(answer, Failed):
            self._child.end()
            raise UserError(answer.error) if answer.for_user else cannot_start(answer.error)

    def attach(self) -> asyncio.AbstractEventLoop:
        """Let the running event loop read the child's answers, and return that loop."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loading or not self._memory.weights.is_whole:
                error = EngineProcessError("the last event loop ended while weights were loaded")
                self._give_up(error)
                raise error
            self._loop = loop
            self._loads = asyncio.Lock()
            if self._child.channel.closed:  # the last loop ended before it could start a new child
                self._restarting = loop.create_task(self._restart())
            else:
                self._listen()
        return loop

    def _listen(self) -> None:
        self._child.channel.attach(self._on_message, self._on_exit)
        self._has_answered = True
        self._check_alive()

    def _check_alive(self) -> None:
        """Kill a child that sent no message since the last check; schedule the next check after `timeout` seconds."""
        if self._health_check is not None:
            self._health_check.cancel()
        if not self._has_answered:
            log.warning("the engine's process sent no message for %g s", self.timeout)
            self._child.kill()
        self._has_answered = False
        self._child.channel.send(Ping())
        self._health_check = asyncio.get_running_loop().call_later(self.timeout, self._check_alive)

    def _on_message(self, message: Any) -> None:
        self._has_answered = True
        match message:
            case TurnAnswer(number, generation, stats):
                self._deaths = 0
                self.stats = self._earlier_stats + stats
                if (pending := self._turns.get(number)) and not pending.future.done():
                    pending.future.set_result(generation)
            case Loaded(number):
                self._deaths = 0
                if self._newest and self._newest.number == number:
                    self._memory.weights.end_reading(self)
                    if self._loaded and not self._loaded.done():
                        self._loading = False
                        self._loaded.set_result(None)
            case Failed(None, text, for_user):
                self._give_up(UserError(text) if for_user else cannot_start(text))
            case Failed(int(number), text, for_user):
                self._deaths = 0
                self._fail_request(number, UserError(text) if for_user else EngineProcessError(text))

    def _fail_request(self, number: int, error: Exception) -> None:
        if (pending := self._turns.get(number)) and not pending.future.done():
            pending.future.set_exception(error)
        elif self._newest and self._newest.number == number:
            # The block holds weights that are not in use, so a new child could not get those of the old one.
            self._give_up(error)

    def _on_exit(self) -> None:
        """Handle the death of the child: start a new one, or give up after `MAX_DEATHS` deaths."""
        how = self._child.end()
        self._earlier_stats = self.stats + EngineStats(extra={"restarts": 1})
        self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            self._give_up(
                UserError(
                    f"the engine's process died {MAX_DEATHS} times without an answer in between (the last time, it "
                    f"{how}); generator.local.process=false runs the engine in the trainer's process, and a lower "
                    "generator.max_num_seqs needs less memory"
                )
            )
            return
        log.warning("the engine's process %s; it is restarted", how)
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        """Start a new child in the state of the old one: weights, open trajectories and unanswered requests."""
        await self._memory.weights.until_written()
        if not self._memory.weights.is_whole:
            self._give_up(EngineProcessError("the newest weights could not be written"))
            return
        try:
            self._child = self._new_child()
        except Exception as error:  # callers that wait for a turn would otherwise wait forever
            self._give_up(cannot_start(f"{type(error).__name__}: {error}"))
            return
        if self._newest is not None:
            self._send_newest(self._newest)
        for trajectory_id in self._open:
            self._child.channel.send(Open(trajectory_id))
        for pending in self._turns.values():
            if pending.released:
                pending.abort()
            else:
                self._child.channel.send(pending.request)
        self._listen()

    async def _load(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        async with self._loads:
            if self._error is not None:
                raise self._error
            self._loaded, self._loading = asyncio.get_running_loop().create_future(), True
            if weights is not None:
                try:
                    await self._memory.weights.write(weights)
                except Exception as error:
                    self._give_up(error)  # the block may hold incomplete weights, which a new child would load
            self._send_load(version)
            await self._loaded
            self._version = version

    def _send_load(self, version: int) -> None:
        self._newest = Load(next(self._numbers), version, self._memory.weights.block is not None)
        self._send_newest(self._newest)

    def _send_newest(self, newest: Load) -> None:
        self._memory.weights.begin_reading(self)
        block = self._memory.weights.block
        if block is not None and block is not self._sent_block:
            self._child.channel.send_file(block.file)
            self._child.channel.send(NewBlock(block.layout))
            self._sent_block = block
        self._child.channel.send(newest)

    def _give_up(self, error: Exception) -> None:
        """End the child; all waiting and further requests raise `error`."""
        self._error = error
        if self._health_check is not None:
            self._health_check.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        self._child.end()
        self._memory.weights.end_reading(self)
        futures = [pending.future for pending in self._turns.values()] + ([self._loaded] if self._loaded else [])
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: asyncio would warn where no caller waits any more
