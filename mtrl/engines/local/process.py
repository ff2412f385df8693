"""The embedded engine in a separate process, which samples turns while this process trains."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mtrl.distributed.gathered import layout_of
from mtrl.engines.base import EngineStats, Generation, SamplingParams
from mtrl.engines.local.block import Block, pack
from mtrl.engines.local.channel import ChannelClosedError
from mtrl.engines.local.child import Child
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.messages import Failed, Generate, Load, Loaded, NewBlock, Open, Ping, Release, Start, TurnAnswer
from mtrl.errors import UserError
from mtrl.types import FinishReason

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

    def __init__(
        self, model: Any, tokenizer: Any, *settings: Any, threads: int = 1, timeout: float = 600.0, **more: Any
    ):
        """Start the process and wait until its engine is ready.

        Args:
            model, tokenizer: model and tokenizer; the process receives copies.
            settings, more: further arguments of `LocalEngine`.
            threads: number of CPU threads of the process.
            timeout: seconds without an answer after which the process counts as hung.

        Raises:
            UserError: the model cannot be sent to a process, or the engine cannot run it.
        """
        inspect.signature(LocalEngine).bind(model, tokenizer, *settings, **more)
        self._threads = threads
        self.timeout = timeout
        """Seconds without an answer after which the process counts as hung; a change applies from the next check on."""
        try:
            pickled, self._model = pack((model, tokenizer, settings, more))
        except Exception as error:
            raise _cannot_start(f"{type(model).__name__} cannot be sent to it: {error}") from error
        self._start = Start(pickled, self._model.layout)
        self._version = 0
        self.stats = EngineStats()
        self._earlier_stats = self.stats
        """Statistics of all earlier children."""
        self._open: dict[str, None] = {}
        """Ids of open trajectories, in the order of `open`."""
        self._turns: dict[int, _PendingTurn] = {}
        self._weights: Block | None = None
        self._newest: Load | None = None
        """Message that makes a new child load the newest weights."""
        self._loaded: asyncio.Future[None] | None = None
        """Future that is done when `_newest` is answered."""
        self._loading = False
        """Whether the block may hold other weights than the child uses."""
        self._unread = False
        """Whether the child was sent a `Load` that it has not confirmed, so that it may still read the block."""
        self._has_read = asyncio.Event()
        """Set while `_unread` is false."""
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

    @property
    def requested_version(self) -> int:
        """Policy version of the newest weights that the process was sent; it may still be loading them."""
        return self._newest.version if self._newest else self._version

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
        loop = self._attach()
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
        loop = self._attach()
        # A caller that is cancelled must not let the next call overwrite weights that the child still reads.
        await asyncio.shield(loop.create_task(self._load(weights, version)))

    async def close(self) -> None:
        """End the process, even in the middle of its work, and abort unanswered turns."""
        for pending in self._turns.values():
            pending.abort()
        self._give_up(EngineProcessError("the engine is closed"))
        for block in (self._model, self._weights):
            if block is not None:
                block.close()

    # -- the child ----------------------------------------------------------------------------------------------------

    def _new_child(self) -> Child:
        child = Child(self._threads)
        child.channel.send_file(self._model.file)
        child.channel.send(self._start)
        return child

    def _wait_for_start(self) -> None:
        try:
            answer = self._child.channel.wait(self.timeout)
        except ChannelClosedError:
            raise _cannot_start(f"it {self._child.end()}") from None
        except TimeoutError as error:
            self._child.end()
            raise _cannot_start(str(error)) from None
        except BaseException:  # such as Ctrl-C, or the end of another rank
            self._child.end()
            raise
        if isinstance(answer, Failed):
            self._child.end()
            raise UserError(answer.error) if answer.for_user else _cannot_start(answer.error)

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Let the running event loop read the child's answers, and return that loop."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loading:
                error = EngineProcessError("the last event loop ended while weights were loaded")
                self._give_up(error)
                raise error
            self._loop = loop
            self._loads, self._writing, self._has_read = asyncio.Lock(), asyncio.Lock(), asyncio.Event()
            if not self._unread:
                self._has_read.set()
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
                self.stats = _sum(self._earlier_stats, stats)
                if (pending := self._turns.get(number)) and not pending.future.done():
                    pending.future.set_result(generation)
            case Loaded(number):
                self._deaths = 0
                if self._newest and self._newest.number == number:
                    self._unread = False
                    self._has_read.set()
                    if self._loaded and not self._loaded.done():
                        self._loading = False
                        self._loaded.set_result(None)
            case Failed(None, text, for_user):
                self._give_up(UserError(text) if for_user else _cannot_start(text))
            case Failed(int(number), text, for_user):
                self._deaths = 0
                self._fail(number, UserError(text) if for_user else EngineProcessError(text))

    def _fail(self, number: int, error: Exception) -> None:
        if (pending := self._turns.get(number)) and not pending.future.done():
            pending.future.set_exception(error)
        elif self._newest and self._newest.number == number:
            # The block holds weights that are not in use, so a new child could not get those of the old one.
            self._give_up(error)

    def _on_exit(self) -> None:
        """Handle the death of the child: start a new one, or give up after `MAX_DEATHS` deaths."""
        how = self._child.end()
        self._earlier_stats = _sum(self.stats, EngineStats(extra={"restarts": 1}))
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
        async with self._writing:  # half-written weights must not be loaded
            try:
                self._child = self._new_child()
            except Exception as error:  # callers that wait for a turn would otherwise wait forever
                self._give_up(_cannot_start(f"{type(error).__name__}: {error}"))
                return
            if self._weights is not None:
                self._send_block(self._weights)
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
                await self._write(weights)
            self._send_load(version)
            await self._loaded
            self._version = version

    async def _write(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights to the block, once no child reads it; if a new block is needed, send it to the child."""
        while True:
            await self._has_read.wait()  # without the lock, which the restart of a child needs
            async with self._writing:
                if self._has_read.is_set():  # no child was started while this call waited for the lock
                    await self._write_now(weights)
                    return

    async def _write_now(self, weights: Mapping[str, Tensor]) -> None:
        try:
            if new := self._weights is None or not self._weights.fits(layout_of(weights)):
                self._weights = Block.like(layout_of(weights))
            await asyncio.to_thread(self._weights.write, weights)
        except Exception as error:
            self._give_up(error)  # the block may hold incomplete weights, which a new child would load
        else:
            if new:
                self._send_block(self._weights)

    def _send_load(self, version: int) -> None:
        self._newest = Load(next(self._numbers), version, self._weights is not None)
        self._send_newest(self._newest)

    def _send_newest(self, newest: Load) -> None:
        self._unread = True
        self._has_read.clear()
        self._child.channel.send(newest)

    def _send_block(self, block: Block) -> None:
        self._child.channel.send_file(block.file)
        self._child.channel.send(NewBlock(block.layout))

    def _give_up(self, error: Exception) -> None:
        """End the child; all waiting and further requests raise `error`."""
        self._error = error
        if self._health_check is not None:
            self._health_check.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
        self._child.end()
        self._has_read.set()  # a call that waits for the child goes on to the error
        futures = [pending.future for pending in self._turns.values()] + ([self._loaded] if self._loaded else [])
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: asyncio would warn where no caller waits any more


def _cannot_start(why: str) -> UserError:
    return UserError(
        f"the local engine's process cannot start ({why}); generator.local.process=false runs the engine in the "
        "trainer's process"
    )


def _sum(one: EngineStats, other: EngineStats) -> EngineStats:
    return EngineStats(
        one.prompt_tokens + other.prompt_tokens,
        one.cached_tokens + other.cached_tokens,
        one.sampled_tokens + other.sampled_tokens,
        dict(Counter(one.extra) + Counter(other.extra)),
    )
