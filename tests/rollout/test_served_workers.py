"""Rollout workers that send their turns to servers: views, updates, restarts and lost workers, in virtual time."""

import asyncio
import random
from functools import partial

import pytest
from in_memory import InMemoryCluster
from toy_turns import ToyTurns

from mtrl.engines.base import EngineLostError, SamplingParams
from mtrl.engines.server.backend import ServerBackend
from mtrl.engines.server.remote import RemoteServerEngine
from mtrl.errors import UserError
from mtrl.rollout.served_workers import ServedWorkers
from mtrl.rollout.workers import WorkerRollouts
from mtrl.types import StopReason
from tests.engines.server.toy_servers import (
    CONTEXT,
    VOCABULARY,
    Cluster,
    ToyAdapterSync,
    ToyApi,
    VirtualPolicy,
    make_engine,
    weights_of,
)

SAMPLING = SamplingParams(max_generate_length=12)


@pytest.fixture(autouse=True)
def _virtual_time():
    asyncio.set_event_loop_policy(VirtualPolicy())
    yield
    asyncio.set_event_loop_policy(None)


class Run:
    """Servers in memory, and workers in this process that send turns to them."""

    def __init__(self, monkeypatch, workers=2, in_flight="continue", cluster=None, sync=None, **settings):
        self.machine = cluster or Cluster()
        self.servers = make_engine(monkeypatch, self.machine, sync, in_flight=in_flight, **settings)
        backend = ServerBackend(
            "toy", self.servers.backend.settings, lambda url, token: ToyApi(self.machine, url), None
        )
        engine = partial(RemoteServerEngine, backend, vocabulary=VOCABULARY, context=CONTEXT, limit=2)
        self.processes = InMemoryCluster(lambda: ToyTurns(engine()))
        self.workers = ServedWorkers(self.processes, workers, 600.0, self.servers)

    @property
    def remotes(self):
        """The engines of the workers that live."""
        return [process.loop.engine for process in self.processes.alive]

    def play(self, script):
        """Run `script(self)` after the start, and close everything."""

        async def whole():
            await self.workers.start()
            try:
                return await asyncio.wait_for(script(self), 3600)
            finally:
                await self.workers.close()

        return asyncio.run(whole())

    async def collect(self, name="step0", groups=6):
        rows = [{"id": str(n), "prompt": [], "ground_truth": {}} for n in range(groups)]
        rollouts = WorkerRollouts(ToyTurns(None), 0, 0.0, workers=self.workers)
        return (await rollouts.collect(name, rows, 2, SAMPLING)).groups


def versions(groups):
    spans = [t.version_spans for group in groups for trajectory in group.trajectories for t in trajectory.turns]
    return {version for turn in spans for version, count in turn if count}


def tokens(groups):
    return [[[turn.action_ids for turn in t.turns] for t in group.trajectories] for group in groups]


@pytest.mark.parametrize("replicas", [1, 2])
def test_groups_are_those_of_one_process(monkeypatch, replicas):
    def played(workers):
        run = Run(monkeypatch, workers=workers, replicas=replicas)
        return run.play(lambda run: run.collect()), run

    (one, _), (three, run) = played(1), played(3)
    assert tokens(one) == tokens(three) and versions(three) == {0}
    assert run.processes.is_closed and not run.machine.up
    assert run.workers.stats.extra["worker_restarts"] == run.workers.stats.extra["restarts"] == 0


@pytest.mark.parametrize("in_flight", ["continue", "drain", "abort"])
def test_groups_after_an_update_have_its_version_and_turns_in_flight_continue(monkeypatch, in_flight):
    async def script(run):
        first = asyncio.ensure_future(run.collect("step0"))
        await asyncio.sleep(1.0)
        await run.workers.load_weights(weights_of(1), 1)
        assert run.workers.version == 1 and all(engine.version == 1 for engine in run.remotes)
        second = await run.collect("step1")
        assert versions(second) == {1}
        return await first

    run = Run(monkeypatch, in_flight=in_flight, replicas=2)
    assert versions(run.play(script)) == {0, 1}
    assert run.servers.sync.sent == [(1, 2)]
    assert not any(server.stale for server in run.machine.servers.values())


@pytest.mark.parametrize("is_worker_lost", [False, True])
def test_no_turn_is_sent_during_an_update(monkeypatch, is_worker_lost):
    """A worker that replaces one that is lost during the update sends none either."""

    async def script(run):
        await run.workers.load_weights(weights_of(1), 1)
        (server,) = run.machine.up
        send = run.servers.sync.send

        async def slow(*arguments):
            await asyncio.sleep(10)  # turns that were in flight before have ended
            if is_worker_lost:
                run.processes.kill(run.processes.alive[0])
            await asyncio.sleep(1)
            played.append(asyncio.ensure_future(run.collect("step1")))
            await asyncio.sleep(20)
            assert not server.running
            await send(*arguments)

        played = [asyncio.ensure_future(run.collect("step0", groups=20))]
        await asyncio.sleep(1.0)
        run.servers.sync.send = slow
        await run.workers.load_weights(weights_of(2), 2)
        return [versions(await groups) for groups in played]

    run = Run(monkeypatch, in_flight="drain", replicas=1)
    assert run.play(script) == [{1, 2}, {2}] and run.processes.killed >= is_worker_lost


def test_prompts_after_an_update_share_no_cache_with_those_before(monkeypatch):
    async def script(run):
        salts = {0: set(), 1: set()}
        generate = ToyApi.generate

        async def record(self, request):
            salts[self.server.version].add(request.cache_salt)
            return await generate(self, request)

        monkeypatch.setattr(ToyApi, "generate", record)
        await run.collect("step0")
        await run.workers.load_weights(weights_of(1), 1)
        await run.collect("step1")
        return salts

    salts = Run(monkeypatch, replicas=1).play(script)
    assert len(salts[0]) == len(salts[1]) == 2, "each of the two workers has its own salt"
    assert not salts[0] & salts[1]


def test_turns_in_flight_keep_their_adapter_and_servers_drop_it_after_them(monkeypatch):
    """Long turns begin under version 1 and end after version 3 is loaded; a server and a worker are lost at the end."""

    async def script(run):
        adapters = [server.adapters for server in run.machine.up]
        await run.workers.load_weights(weights_of(1), 1)
        first = asyncio.ensure_future(run.collect("step0"))
        await asyncio.sleep(0.25)
        for version in (2, 3):
            await run.workers.load_weights(weights_of(version), version)
        seen = [sorted(held.values()) for held in adapters]
        first = await first
        second = await run.collect("step1")
        await asyncio.sleep(1.0)
        kept = [sorted(held.values()) for held in adapters]
        third = asyncio.ensure_future(run.collect("step2"))
        await asyncio.sleep(1.0)
        run.machine.up[0].dead.set()
        run.processes.kill(run.processes.alive[0])
        return first, second, await third, seen, kept

    run = Run(monkeypatch, replicas=2, sync=ToyAdapterSync())
    for server in run.machine.up:
        server.slow = 5
    first, second, third, seen, kept = run.play(script)
    assert versions(first) == {1, 3} and versions(second) == versions(third) == {3}
    assert all({1, 3} <= {*held} for held in seen) and kept == [[3]] * 2
    spans = [t.version_spans for group in first for trajectory in group.trajectories for t in trajectory.turns]
    assert all(len(turn) == 1 for turn in spans), "each turn is sampled by one adapter"
    assert run.workers.stats.extra["worker_restarts"] == run.servers.server_group.restarts == 1


def test_a_worker_that_is_lost_during_an_update_begins_with_the_new_weights(monkeypatch):
    async def script(run):
        first = asyncio.ensure_future(run.collect("step0"))
        await asyncio.sleep(0.5)
        update = asyncio.ensure_future(run.workers.load_weights(weights_of(1), 1))
        await asyncio.sleep(0.2)
        run.processes.kill(run.processes.alive[0])
        await update
        assert versions(await run.collect("step1")) == {1}
        return await first

    run = Run(monkeypatch, workers=2)
    groups = run.play(script)
    assert len(groups) == 6 and versions(groups) == {0, 1}
    assert run.workers.stats.extra["worker_restarts"] == 1


def test_turns_go_to_a_restarted_server_at_its_new_address(monkeypatch):
    async def script(run):
        await run.workers.load_weights(weights_of(1), 1)
        first = asyncio.ensure_future(run.collect("step0", groups=10))
        await asyncio.sleep(1.0)
        run.machine.up[0].dead.set()
        groups = await first
        before = {replica.api.url for engine in run.remotes for replica in engine.servers.replicas}
        return groups, before

    run = Run(monkeypatch, replicas=1)
    groups, urls = run.play(script)
    assert versions(groups) == {1} and run.servers.server_group.restarts == 1
    assert urls == {run.servers.server_group.replicas[0].api.url}
    assert run.workers.stats.extra["resent"] > 0


def test_servers_that_cannot_be_restarted_end_the_run_in_one_sentence(monkeypatch):
    async def script(run):
        first = asyncio.ensure_future(run.collect("step0"))
        await asyncio.sleep(1.0)
        run.machine.stillborn = 100
        run.machine.up[0].dead.set()
        await first

    with pytest.raises(EngineLostError, match="was restarted generator.toy.restarts=1 times"):
        Run(monkeypatch, replicas=1, restarts=1).play(script)


def test_a_server_that_only_the_leader_reaches_gets_no_turns_until_it_answers(monkeypatch):
    async def script(run):
        await run.workers.load_weights(weights_of(1), 1)
        (engine,) = run.remotes
        replica, reachable = engine.servers.replicas[0], ToyApi.is_alive

        async def unreachable(self):
            return False

        replica.api.is_alive = partial(unreachable, replica.api)
        replica.suspect()
        await asyncio.sleep(60)
        assert not replica.load.serving
        replica.api.is_alive = partial(reachable, replica.api)
        return await run.collect()

    assert versions(Run(monkeypatch, workers=1).play(script)) == {1}


def test_a_worker_that_reaches_no_server_does_not_start(monkeypatch):
    run = Run(monkeypatch)
    for server in run.machine.up:
        server.broken.add("is_alive")
    with pytest.raises(UserError, match=r"a rollout worker cannot reach http://127.0.0.1:\d+; only processes"):
        asyncio.run(run.workers.start())


def test_a_server_with_unknown_weights_ends_the_run(monkeypatch):
    async def script(run):
        await run.workers.load_weights(weights_of(1), 1)
        run.machine.up[0].version = 7
        await run.collect()

    with pytest.raises(EngineLostError, match="sampled with weights of version 7 instead of 1"):
        Run(monkeypatch, replicas=1).play(script)


def test_sleeping_servers_get_no_turns(monkeypatch):
    async def script(run):
        first = asyncio.ensure_future(run.collect("step0"))
        await asyncio.sleep(1.0)
        await run.workers.sleep()
        assert all(server.asleep and not server.running for server in run.machine.up)
        await asyncio.sleep(60)
        await run.workers.wake()
        await run.workers.load_weights(weights_of(1), 1)
        return await first

    assert versions(Run(monkeypatch, replicas=2).play(script)) == {0, 1}


@pytest.mark.parametrize("seed", range(30))
def test_random_updates_and_losses(monkeypatch, seed):
    """Workers and servers are lost at random moments of updates and turns: no group is lost, and no token of a group
    that was requested after an update has an older version."""
    monkeypatch.setattr("mtrl.rollout.workers.MAX_DEATHS", 1000)
    rng = random.Random(seed)

    async def kill(run):
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0, 8))
            if rng.random() < 0.5 and run.processes.alive:
                run.processes.kill(rng.choice(run.processes.alive))
            elif run.machine.up:
                rng.choice(run.machine.up).dead.set()

    async def script(run):
        killer, played = asyncio.ensure_future(kill(run)), []
        for step in range(1, 5):
            groups = asyncio.ensure_future(run.collect(f"step{step}", groups=4))
            await asyncio.sleep(rng.uniform(0, 5))
            await run.workers.load_weights(weights_of(step), step)
            played.append((step, groups))
        for step, groups in played:
            found = await groups
            assert len(found) == 4 and min(versions(found)) >= step - 1
            assert all(t.stop_reason is StopReason.DONE for group in found for t in group.trajectories)
        await killer

    run = Run(monkeypatch, workers=3, replicas=2, in_flight=rng.choice(["continue", "drain", "abort"]), restarts=9)
    run.play(script)
    assert not any(server.stale for server in run.machine.servers.values())
