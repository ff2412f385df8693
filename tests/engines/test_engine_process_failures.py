"""Engine processes that cannot start or restart: one error, and no process remains."""

import asyncio
import os
import signal

import pytest
import torch
from engine_processes import ask, has_ended, make_engine, run
from toy_model import Refused, Stillborn, Unpicklable, weights_of

from mtrl.engines.local import process
from mtrl.engines.local.block import Block, TensorPlace
from mtrl.engines.local.channel import Channel
from mtrl.engines.local.child import Child
from mtrl.errors import UserError

pytestmark = [pytest.mark.xdist_group("engine_process"), pytest.mark.usefixtures("forked_children")]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (Unpicklable, "Unpicklable cannot be sent to it: cannot pickle a toy that is bolted down"),
        (Refused, "generator.backend=local cannot run Refused"),
        (Stillborn, "cannot start \\(it ended with status 7\\); generator.local.process=false"),
    ],
)
def test_a_failed_start_is_reported(model, error):
    with pytest.raises(UserError, match=error):
        make_engine(model())


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'slots'"):
        make_engine(slots=3)


def test_a_process_that_cannot_be_restarted_ends_the_engine(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(process, "Child", lambda threads, gpu: 1 / 0)  # such as no memory for another process

    async def go():
        turn = ask(engine, "a")
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="cannot start \\(ZeroDivisionError: .*generator.local.process=false"):
            await turn
        await engine.close()

    run(go())


def test_a_block_that_the_process_cannot_map_ends_the_engine(monkeypatch):
    """The process would otherwise keep the old weights."""
    engine = make_engine()

    async def go():
        await engine.load_weights(weights_of(0), 0)
        block = Block.like(weights_of(1))
        block.layout = block.layout | {"more": TensorPlace(1 << 50, (1,), torch.float32)}
        monkeypatch.setattr(Block, "fits", lambda block, weights: False)
        monkeypatch.setattr(Block, "like", lambda weights: block)
        with pytest.raises(UserError, match="cannot start .*; generator.local.process=false"):
            await engine.load_weights(weights_of(1), 1)

    run(go())
    assert has_ended(engine.pid)


def test_an_interrupted_start_leaves_no_process(monkeypatch):
    made = []

    def wait(channel, seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "wait", wait)
    monkeypatch.setattr(process, "Child", lambda threads, gpu: made.append(Child(threads)) or made[-1])
    with pytest.raises(KeyboardInterrupt):
        make_engine()
    assert has_ended(made[0].pid)


def test_memory_without_the_calls_of_linux(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "posix_fallocate")
    block = Block.like(weights_of(1))
    block.write(weights_of(1))
    assert all(torch.equal(block.tensors[name], value) for name, value in weights_of(1).items())
