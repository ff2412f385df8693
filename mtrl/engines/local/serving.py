"""The child process of a `ProcessEngine`: a `LocalEngine` that answers messages."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from mtrl.engines.local.block import Block, Layout, unpack
from mtrl.engines.local.channel import Channel
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.messages import (
    Failed,
    Generate,
    Load,
    Loaded,
    NewBlock,
    Open,
    Ping,
    Pong,
    Ready,
    Release,
    Start,
    TurnAnswer,
)
from mtrl.errors import UserError


def serve(messages: int, files: int) -> None:
    """Serve the parent on these inherited sockets, given as file descriptors, until it closes its side."""
    asyncio.run(_Server(Channel(socket.socket(fileno=messages), socket.socket(fileno=files))).run())


class _Server:
    def __init__(self, channel: Channel):
        self._channel = channel
        self._engine: LocalEngine
        self._block: Block
        """Block from which new weights are read; not set before the first `NewBlock`."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        ended = asyncio.Event()
        self._channel.attach(self._on_message, ended.set)
        await ended.wait()

    def _on_message(self, message: Any) -> None:
        try:
            self._handle(message)
        except Exception as error:  # the engine cannot serve without its model or its block
            self._channel.send(_failed(None, error))

    def _handle(self, message: Any) -> None:
        match message:
            case Ping():
                self._channel.send(Pong())
            case Start(pickled, layout):
                self._start(pickled, self._take_block(layout))
            case NewBlock(layout):
                self._block = self._take_block(layout)
            case _:
                # Tasks start in the order of their creation, so messages take effect in the order of their arrival.
                task = asyncio.get_running_loop().create_task(self._answer(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _take_block(self, layout: Layout) -> Block:
        block = Block(self._channel.receive_file(), layout)
        block.close()
        return block

    def _start(self, pickled: bytes, block: Block) -> None:
        model, tokenizer, args, kwargs = unpack(pickled, block)
        self._engine = LocalEngine(model.eval(), tokenizer, *args, **kwargs)
        self._channel.send(Ready())

    async def _answer(self, message: Any) -> None:
        engine = self._engine
        try:
            match message:
                case Open(trajectory_id):
                    engine.open(trajectory_id)
                case Release(trajectory_id):
                    engine.release(trajectory_id)
                case Generate(number, trajectory_id, prompt, sampling):
                    generation = await engine.generate(trajectory_id, prompt, sampling)
                    self._channel.send(TurnAnswer(number, generation, engine.stats))
                case Load(number, version, from_block):
                    await engine.load_weights(self._block.tensors if from_block else None, version)
                    self._channel.send(Loaded(number))
        except Exception as error:
            self._channel.send(_failed(getattr(message, "number", None), error))


def _failed(number: int | None, error: Exception) -> Failed:
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return Failed(number, text, isinstance(error, UserError))
