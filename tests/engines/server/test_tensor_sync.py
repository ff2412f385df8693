"""Weight sync by shared memory to server processes."""

import asyncio
import base64
import os
import pickle
import shutil
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from weight_server import Cast, WeightServer

from mtrl.config.engine_schema import VllmConfig
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.sync import SyncError
from mtrl.engines.server.tensor_sync import TensorSync
from mtrl.errors import UserError
from tests import forked

WEIGHTS = {"a": torch.randn(100, 100), "b": torch.randn(7), "n": torch.arange(5), "empty": torch.ones(0)}


def make_sync(**settings):
    return TensorSync(VllmConfig(**settings), Cast("float32"), bucket=2**15)


def shared_files():
    return {path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")}


def test_servers_share_one_memory_block_that_is_freed():
    async def scenario():
        before, strategy = shared_files(), torch.multiprocessing.get_sharing_strategy()
        async with WeightServer("127.0.0.1:1") as a, WeightServer("localhost:2") as b:
            sync = make_sync()
            for version in (1, 2):
                await sync.send([a, b], WEIGHTS, version)
                assert await a.state() == await b.state() == (version, checksum(WEIGHTS))
            await sync.close()
            assert shared_files() == before
        assert torch.multiprocessing.get_sharing_strategy() == strategy

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "words", "seconds"),
    [("kill", "gone", 60.0), ("stop", "no answer", 8.0), ("refuse", "I refuse", 60.0)],
)
def test_memory_is_freed_if_a_server_did_not_read_it(fault, words, seconds):
    """Only the server that stops takes the whole time limit; the healthy one must answer within it."""

    async def scenario():
        before = shared_files()
        async with (
            WeightServer("127.0.0.1:1", seconds=seconds) as healthy,
            WeightServer("127.0.0.1:2", fault, "receive_tensors", seconds=seconds) as sick,
        ):
            with pytest.raises(SyncError, match=words) as caught:
                await make_sync(sync_timeout=seconds).send([sick, healthy], WEIGHTS, 3)
            assert list(caught.value.failed) == [sick.url]
            assert await healthy.state() == (3, checksum(WEIGHTS))
            assert shared_files() == before

    asyncio.run(scenario())


class ForgetsNothing(ThreadPoolExecutor):
    """Keeps the functions and arguments of all calls, as a thread does for a moment after each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def submit(self, *call, **settings):
        self.calls.append(call)
        return super().submit(*call, **settings)


def test_a_slow_thread_does_not_keep_unread_memory():
    async def scenario():
        before = shared_files()
        asyncio.get_running_loop().set_default_executor(ForgetsNothing())
        async with WeightServer("127.0.0.1:1", "refuse", "receive_tensors") as sick:
            with pytest.raises(SyncError, match="I refuse"):
                await make_sync().send([sick], WEIGHTS, 3)
        assert shared_files() == before

    asyncio.run(scenario())


def test_every_worker_reads_a_payload_of_its_own(monkeypatch):
    """CUDA counts the references of each pickling separately: every pickling needs exactly one reader. Only a GPU can
    show that the memory is freed, so numbers stand for CUDA's handles here."""
    made, read = [], []

    def reduce(tensor):
        made.append(len(made))
        return int, (made[-1],)

    class Worker:
        url = "http://127.0.0.1:1"

        async def begin_update(self):
            pass

        async def receive_tensors(self, payloads, version, checksum):
            read.extend(number for payload in payloads for _, number in pickle.loads(base64.b64decode(payload)))
            assert len(payloads) == 3

        async def end_update(self, version):
            pass

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", reduce)
    asyncio.run(make_sync(tensor_parallel_size=3).send([Worker()], WEIGHTS, 1))
    assert made and sorted(read) == made


def test_the_memory_of_several_workers_is_freed():
    async def scenario():
        before = shared_files()
        async with WeightServer() as server:
            await make_sync(tensor_parallel_size=2).send([server], WEIGHTS, 1)
            assert await server.state() == (1, checksum(WEIGHTS)) and shared_files() == before

    asyncio.run(scenario())


TRAINER = """
import sys, torch
from mtrl.engines.server.tensor_sync import SharedTensors
shared = SharedTensors({"a": torch.arange(9.0)}, None)
print(*shared.payloads(1), flush=True)
sys.stdin.read()
"""


def test_the_shared_memory_manager_does_not_hold_the_output_open():
    """torch_shm_manager runs as long as a process maps its memory; here this process does."""
    with forked.Popen(
        [sys.executable, "-c", TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as trainer:
        try:
            ((_, tensor),) = pickle.loads(base64.b64decode(trainer.stdout.readline()))
            trainer.communicate(timeout=60)  # to the end of its output, which no other process has open
        finally:
            trainer.kill()
            trainer.stdout.close()
    assert trainer.returncode == 0
    assert torch.equal(tensor, torch.arange(9.0))


def test_servers_on_other_machines_are_refused():
    with pytest.raises(UserError, match=r"generator\.vllm\.weight_sync=tensor .*10\.0\.0\.7.*distributed"):
        make_sync(urls=["http://127.0.0.1:8000", "http://10.0.0.7:8000"])


def test_too_little_shared_memory_is_reported(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1))

    async def scenario():
        async with WeightServer() as server:
            with pytest.raises(UserError, match="--shm-size"):
                await make_sync().send([server], WEIGHTS, 1)

    asyncio.run(scenario())
