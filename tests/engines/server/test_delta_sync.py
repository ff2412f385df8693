"""Weight sync by broadcast of changes: servers always get the trainer's weights bit for bit, whole where needed."""

import asyncio

import pytest
import torch
from weight_server import Cast, WeightServer

from mtrl.config.engine_schema import VllmConfig
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.distributed_sync import DistributedSync
from mtrl.engines.server.sync import SyncError

LIMIT = 3.0


def steps(count, seed=0):
    """Yield the weights of consecutive versions in float32, of which few elements change in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "a": torch.randn(300, 1000, generator=generator),
        "b": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 3),
        "n": torch.arange(5),
        "big": torch.randn(500_000, generator=generator),
    }
    for _ in range(count):
        yield weights
        weights = {
            name: value * (1 + 1e-5 * torch.randn(value.shape, generator=generator))
            if value.is_floating_point()
            else value
            for name, value in weights.items()
        }


def sent(weights):
    return checksum(dict(Cast("bfloat16")(weights)))


WHOLE = sum(value.nbytes for _, value in Cast("bfloat16")(next(steps(1))))


def make_sync(seconds=LIMIT, delta=True):
    settings = VllmConfig(weight_sync="distributed", sync_delta=delta, sync_timeout=seconds)
    return DistributedSync(settings, Cast("bfloat16"), bucket=2**19)


def run(scenario):
    async def limited():
        async with asyncio.timeout(90):
            await scenario()

    asyncio.run(limited())


def last_base(server, count=4):
    """Return the version from which the last update of a server started; None: it was whole. An update of these
    weights has four parts: a, then b and empty, n, and big."""
    (base,) = set(server.bases[-count:])
    return base


def test_changes_are_sent_to_servers_that_keep_the_last_weights():
    async def scenario():
        async with WeightServer("127.0.0.1:1") as a, WeightServer("127.0.0.1:2") as b:
            sync, sizes = make_sync(30.0), []
            plan = [([a], None), ([a], 1), ([a, b], None), ([b, a], 3), ([b], 4), ([a, b], None), ([b, a], 6)]
            for version, ((servers, base), weights) in enumerate(zip(plan, steps(len(plan)), strict=True), start=1):
                await sync.send(servers, weights, version)
                for server in servers:
                    assert await server.state() == (version, sent(weights))
                    assert last_base(server) == base, version
                sizes.append((sync.sent_bytes, base))
            assert all(size == WHOLE if base is None else 0 < size < WHOLE / 20 for size, base in sizes), sizes
            assert "receive_broadcast" not in a.calls + b.calls
            await sync.close()

    run(scenario)


def test_a_restarted_server_gets_the_newest_weights_alone_and_then_changes():
    """As `ServerGroup` does: a restarted server is sent the same tensors as the others before."""

    async def scenario():
        first, second, third = steps(3)
        async with WeightServer("127.0.0.1:1") as a:
            sync = make_sync(30.0)
            async with WeightServer("127.0.0.1:2") as b:
                await sync.send([a, b], first, 1)
                await sync.send([a, b], second, 2)
            async with WeightServer("127.0.0.1:2") as b:
                await sync.send([b], second, 2)
                assert last_base(b) is None
                await sync.send([a, b], third, 3)
                assert last_base(a) == last_base(b) == 2
                assert await a.state() == await b.state() == (3, sent(third))
            await sync.close()

    run(scenario)


def test_a_server_that_was_replaced_unnoticed_refuses_changes(caplog):
    async def scenario():
        first, second, third = steps(3)
        sync, a, b = make_sync(), WeightServer("127.0.0.1:1"), WeightServer("127.0.0.1:2")
        async with b:
            async with a:
                await sync.send([a, b], first, 1)
            async with a:  # the same name for another process
                await sync.send([a, b], second, 2)
                assert "keeps no weights, and the changes are from version 1" in caplog.text
                assert last_base(a) is last_base(b) is None
                await sync.send([a, b], third, 3)
                assert last_base(a) == last_base(b) == 2
                assert await a.state() == await b.state() == (3, sent(third))
        await sync.close()

    run(scenario)


def test_changes_from_the_weights_of_another_trainer_are_refused():
    async def scenario():
        first, second = steps(2)
        (others,) = steps(1, seed=1)
        async with WeightServer() as server:
            sync, other = make_sync(), make_sync()
            await sync.send([server], first, 1)
            await other.send([server], others, 9)
            await sync.send([server], second, 2)
            assert last_base(server) is None
            assert await server.state() == (2, sent(second))
            await sync.close()
            await other.close()

    run(scenario)


@pytest.mark.parametrize("side", ["server", "trainer"])
def test_an_error_of_the_kept_weights_is_noticed_and_repaired(caplog, side):

    async def scenario():
        first, second, third = steps(3)
        async with WeightServer("127.0.0.1:1") as a, WeightServer("127.0.0.1:2") as b:
            sync = make_sync()
            await sync.send([a, b], first, 1)
            if side == "server":
                b.fault, b.at = "drift", "check_kept"
            else:
                first["big"].copy_(second["big"])  # so that the trainer finds no changes
            await sync.send([a, b], second, 2)
            assert "another checksum" in caplog.text
            assert last_base(a) is last_base(b) is None
            assert await a.state() == await b.state() == (2, sent(second))
            b.fault = ""
            await sync.send([a, b], third, 3)
            assert last_base(a) == last_base(b) == 2
            assert await a.state() == await b.state() == (3, sent(third))
            await sync.close()

    run(scenario)


@pytest.mark.parametrize(
    ("fault", "at", "words"),
    [
        ("kill", "receive_changes", "gone"),
        ("kill", "check_kept", "gone"),
        ("refuse", "end_update", "I refuse"),
    ],
)
def test_a_failed_server_does_not_fail_the_others(fault, at, words):
    async def scenario():
        first, second, third = steps(3)
        async with WeightServer("127.0.0.1:1", seconds=LIMIT + 1) as healthy:
            sync = make_sync()
            async with WeightServer("127.0.0.1:2", seconds=LIMIT + 1) as sick:
                await sync.send([sick, healthy], first, 1)
                sick.fault, sick.at = fault, at
                with pytest.raises(SyncError, match=words) as caught:
                    await sync.send([sick, healthy], second, 2)
                assert list(caught.value.failed) == [sick.url]
                assert await healthy.state() == (2, sent(second))
            async with WeightServer("127.0.0.1:2", seconds=LIMIT + 1) as fresh:
                await sync.send([fresh, healthy], third, 3)
                assert last_base(fresh) is last_base(healthy) is None
                assert await fresh.state() == await healthy.state() == (3, sent(third))
            await sync.close()

    run(scenario)


def test_a_cancelled_send_is_followed_by_whole_weights():
    async def scenario():
        first, second, third = steps(3)
        async with WeightServer("127.0.0.1:1", seconds=60.0) as server:
            sync = make_sync(2.0)
            await sync.send([server], first, 1)
            task = asyncio.create_task(sync.send([server], second, 2))
            while "check_kept" not in server.calls:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await sync.send([server], third, 3)
            assert last_base(server) is None
            assert await server.state() == (3, sent(third))
            await sync.close()

    run(scenario)


def test_without_the_key_whole_tensors_are_sent():
    async def scenario():
        async with WeightServer() as server:
            sync = make_sync(delta=False)
            for version, weights in enumerate(steps(2), start=1):
                await sync.send([server], weights, version)
                assert await server.state() == (version, sent(weights))
                assert sync.sent_bytes == WHOLE
            assert {"receive_changes", "check_kept"}.isdisjoint(server.calls)
            await sync.close()

    run(scenario)
