"""The memory that the processes of an engine share with the trainer: the model at their start, and newer weights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtrl.distributed.gathered import layout_of
from mtrl.engines.local.block import Block, pack
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.messages import Start
from mtrl.errors import UserError


def cannot_start(why: str) -> UserError:
    return UserError(
        f"the local engine's process cannot start ({why}); generator.local.process=false runs the engine in the "
        "trainer's process"
    )


class EngineMemory:
    """The memory of one or several processes that run the same model.

    Args:
        model, tokenizer: model and tokenizer; the processes receive copies.
        settings, more: further arguments of `LocalEngine`.

    Raises:
        UserError: the model cannot be sent to a process.
    """

    def __init__(self, model: Any, tokenizer: Any, *settings: Any, **more: Any):
        inspect.signature(LocalEngine).bind(model, tokenizer, *settings, **more)
        try:
            pickled, self.model = pack((model, tokenizer, settings, more))
        except Exception as error:
            raise cannot_start(f"{type(model).__name__} cannot be sent to it: {error}") from error
        self.start = Start(pickled, self.model.layout)
        """First message to each process."""
        self.weights = WeightMemory()

    def close(self) -> None:
        """Close the files. A second call has no effect."""
        for block in (self.model, self.weights.block):
            if block is not None:
                block.close()


class WeightMemory:
    """The newest weights. The trainer writes them only while no process reads, and a process reads them only while the
    trainer does not write. All calls must be made on one event loop."""

    def __init__(self) -> None:
        self.block: Block | None = None
        self.is_whole = True
        """Whether the block holds one set of weights: false if the event loop ended or an error occurred in a write."""
        self._is_written = False
        self._readers: set[object] = set()
        self._waiting: list[asyncio.Future[None]] = []

    def begin_reading(self, reader: object) -> None:
        """Note that a process may read from now on; the caller must have awaited `until_written`."""
        assert not self._is_written, "weights are being written"
        self._readers.add(reader)

    def end_reading(self, reader: object) -> None:
        """Note that a process has finished reading, or has ended."""
        self._readers.discard(reader)
        self._wake()

    async def until_written(self) -> None:
        """Wait while weights are written."""
        while self._is_written:
            await self._change()

    async def write(self, weights: Mapping[str, Tensor]) -> None:
        """Wait until no process reads, and copy the weights into the block, or into a new one if they do not fit.

        Raises:
            UserError: there is not enough memory for a new block.
        """
        while self._readers or self._is_written:
            await self._change()
        self._is_written, self.is_whole = True, False
        try:
            if self.block is None or not self.block.fits(layout_of(weights)):
                self.block = Block.like(layout_of(weights))
            await asyncio.to_thread(self.block.write, weights)
            self.is_whole = True
        finally:
            self._is_written = False
            self._wake()

    async def _change(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():  # a future of an earlier event loop was cancelled
                future.set_result(None)
