"""Processes of engines that cannot start, or cannot start again: one error, and nothing is left."""

import asyncio
import os
import signal

import pytest
import torch
from engine_processes import ask, gone, make_engine, run
from toy_model import Refused, Stillborn, Unpicklable, weights_of

from mtrl.engines.local import process
from mtrl.engines.local.block import Block, Place
from mtrl.engines.local.channel import Channel
from mtrl.engines.local.child import Child
from mtrl.errors import UserError

pytestmark = pytest.mark.xdist_group("engine_process")


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Unpicklable, "Unpicklable cannot be given to it: cannot pickle a toy that is bolted down"),
        (Refused, "generator.backend=local cannot run Refused"),
        (Stillborn, "cannot start \\(it ended with status 7\\); generator.local.process=false"),
    ],
)
def test_a_start_that_fails(model, error):
    with pytest.raises(UserError, match=error):
        make_engine(model())


def test_settings_that_there_are_not():
    with pytest.raises(TypeError, match="unexpected keyword argument 'slots'"):
        make_engine(slots=3)


def test_a_new_process_that_cannot_be_made_ends_in_one_error(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "_new_child", lambda: 1 / 0)  # such as no memory for one more process

    async def go():
        turn = ask(engine, "a")
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="cannot start \\(ZeroDivisionError: .*generator.local.process=false"):
            await turn
        await engine.close()

    run(go())


def test_a_block_that_the_process_cannot_map_ends_in_one_error():
    """It would copy the old weights instead, or none."""
    engine = make_engine()

    async def go():
        block = Block.like(weights_of(1))
        block.fits = lambda weights: True
        block.layout = block.layout | {"more": Place(1 << 50, (1,), torch.float32)}
        await engine.load_weights(weights_of(0), 0)
        engine._send_block(block)
        with pytest.raises(UserError, match="cannot start .*; generator.local.process=false"):
            await engine.load_weights(weights_of(1), 1)

    run(go())
    assert gone(engine.pid)


def test_whoever_stops_waiting_for_the_start_leaves_no_process(monkeypatch):
    made = []

    def wait(channel, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "wait", wait)
    monkeypatch.setattr(process, "Child", lambda threads: made.append(Child(threads)) or made[-1])
    with pytest.raises(KeyboardInterrupt):
        make_engine()
    assert gone(made[0].pid)


def test_memory_without_the_calls_of_linux(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    block = Block.like(weights_of(1))
    block.write(weights_of(1))
    assert all(torch.equal(block.tensors[name], value) for name, value in weights_of(1).items())
