"""Weight sync by broadcast to server processes: only a faulty server fails."""

import asyncio

import pytest
import torch
from weight_server import Cast, WeightServer

from mtrl.config.engine_schema import SglangConfig
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.distributed_sync import DistributedSync, own_address
from mtrl.engines.server.sync import SyncError
from mtrl.errors import UserError

WEIGHTS = {
    "a": torch.randn(300, 1000),
    "b": torch.randn(7),
    "n": torch.arange(5),
    "c": torch.randn(3, 4).bfloat16(),
    "big": torch.randn(3_000_000),
}
SENT = {name: value.bfloat16() if value.is_floating_point() else value for name, value in WEIGHTS.items()}
LIMIT = 3.0


def make_sync(seconds=LIMIT):
    return DistributedSync(SglangConfig(sync_timeout=seconds), Cast("bfloat16"), bucket=2**19)


def run(scenario):
    async def limited():
        async with asyncio.timeout(90):
            await scenario()

    asyncio.run(limited())


def test_every_version_reaches_a_changing_set_of_servers():
    async def scenario():
        async with WeightServer("127.0.0.1:1") as a, WeightServer("127.0.0.1:2") as b, WeightServer("[::1]:3") as c:
            sync = make_sync(30.0)
            for version, servers in enumerate(([a], [a, b], [a, b], [b, c], [c, a, b]), start=1):
                await sync.send(servers, WEIGHTS, version)
                for server in servers:
                    assert await server.state() == (version, checksum(SENT))
            assert b.calls.count("join") == 3  # not again for the second version of the same two
            await sync.close()
            assert all(server.calls.count("leave") == server.calls.count("join") for server in (a, b, c))

    run(scenario)


@pytest.mark.parametrize(
    ("fault", "at", "words"),
    [
        ("kill", "receive_broadcast", "gone"),
        ("stop", "receive_broadcast", "no answer"),
        ("refuse", "receive_broadcast", "I refuse"),
        ("kill", "join", "gone"),
        ("refuse", "begin_update", "I refuse"),
        ("refuse", "end_update", "I refuse"),
    ],
)
def test_a_failed_server_does_not_fail_the_others(fault, at, words):
    async def scenario():
        async with WeightServer("127.0.0.1:1", seconds=LIMIT + 1) as healthy:
            async with WeightServer("127.0.0.1:2", fault, at, seconds=LIMIT + 1) as sick:
                sync = make_sync()
                with pytest.raises(SyncError, match=words) as caught:
                    await sync.send([sick, healthy], WEIGHTS, 7)
                assert list(caught.value.failed) == [sick.url]
                assert await healthy.state() == (7, checksum(SENT))
            async with WeightServer("127.0.0.1:2", seconds=LIMIT + 1) as fresh:
                await sync.send([fresh, healthy], WEIGHTS, 8)
                assert await fresh.state() == await healthy.state() == (8, checksum(SENT))
                await sync.close()

    run(scenario)


def test_a_restarted_server_joins_a_new_group():
    async def scenario():
        sync, server = make_sync(), WeightServer("127.0.0.1:1", seconds=LIMIT + 1)
        for version in (1, 2):  # the same name for another process
            async with server:
                await sync.send([server], WEIGHTS, version)
                assert await server.state() == (version, checksum(SENT))
        await sync.close()

    run(scenario)


def test_a_cancelled_send_leaves_no_waiting_server():
    async def scenario():
        async with WeightServer("127.0.0.1:1", "stop", "receive_broadcast", seconds=60.0) as server:
            sync = make_sync(2.0)
            task = asyncio.create_task(sync.send([server], WEIGHTS, 1))
            await asyncio.sleep(1.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            server.fault = ""
            await sync.close()

    run(scenario)


def test_own_address_is_reachable_by_the_servers():
    assert own_address(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"]) == "127.0.0.1"
    with pytest.raises(OSError):
        own_address(["http://no-such-host.invalid:1"])


def test_a_broadcast_between_shared_gpus_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=r"generator\.sglang\.weight_sync=distributed.*weight_sync=tensor"):
        DistributedSync(SglangConfig(colocate=True), Cast("bfloat16"))
