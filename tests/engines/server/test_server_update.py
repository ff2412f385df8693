"""Weight updates of servers: every token has the version that sampled it, and no cache of older weights is used."""

import asyncio
from dataclasses import replace

import pytest
from toy_servers import (
    LONG,
    PROMPT,
    SHORT,
    TICK,
    ToyAdapterSync,
    ToySync,
    ask,
    check_turn,
    run_engine,
    weights_of,
)

from mtrl.errors import UserError


@pytest.mark.parametrize(
    ("mode", "seen"), [("continue", [0, 1]), ("in_place", [0, 1]), ("abort", [0, 1]), ("drain", [0])]
)
def test_weights_change_during_turns(make, cluster, mode, seen):
    engine = make(replicas=2, pause_mode=mode)

    async def go():
        turns = [ask(engine, f"{i}/0", [i]) for i in range(10)]
        await asyncio.sleep(1)
        late = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await asyncio.sleep(0.2)
        new = ask(engine, "new/0", [20])
        await late
        assert engine.version == 1
        for i, turn in enumerate(turns):
            answer = await turn
            check_turn(answer, [i], LONG)
            assert [version for version, _ in answer.version_spans] == seen
        check_turn(await new, [20], LONG, [1])
        assert engine.stats.sampled_tokens == 11 * 40 and engine.stats.prompt_tokens == 11
        assert engine.stats.extra["retries"] == 0
        assert engine.stats.extra["sync_seconds"] >= 0.5

    run_engine(engine, go())


def test_servers_are_not_paused_while_an_update_is_prepared(make, cluster):
    sync = ToySync()
    engine = make(replicas=2, sync=sync)
    sync.is_paused = lambda: any(not server.unpaused.is_set() for server in cluster.servers.values())

    async def go():
        turn = ask(engine)
        await asyncio.sleep(1)
        await engine.load_weights(weights_of(1), 1)
        await turn
        assert sync.prepared == [(1, False)] and sync.sent == [(1, 2)]

    run_engine(engine, go())


def test_a_turn_with_stop_strings_restarts_after_a_pause(make):
    """Such a turn starts again and has one version."""
    engine, stops = make(pause_mode="abort"), replace(LONG, stop=("</sql>",))

    async def go():
        turn = ask(engine, sampling=stops)
        await asyncio.sleep(1)
        await engine.load_weights(weights_of(1), 1)
        check_turn(await turn, PROMPT, LONG, [1])

    run_engine(engine, go())


@pytest.mark.parametrize("mode", ["continue", "abort", "drain", "in_place"])
def test_no_turn_uses_the_cache_of_older_weights(make, cluster, mode):
    engine = make(pause_mode=mode)

    async def go():
        context, version = PROMPT, 0
        for i in range(6):
            other = ask(engine, f"other{i}/0", [i])
            answer = await engine.generate("g/0", context, SHORT)
            check_turn(answer, context, SHORT, [version])
            context = [*context, *answer.token_ids]
            if i % 2:
                version = min(version + 1, 2)  # the last one is loaded twice
                await engine.load_weights(weights_of(version), version)
            await other
        assert answer.cached_tokens
        assert cluster.up[0].stale == 0

    run_engine(engine, go())


def test_a_server_that_fails_a_step_restarts_with_the_newest_weights(make, cluster):
    for step in ("pause", "begin_update", "receive_folder", "end_update", "drop_cache", "version", "resume"):
        engine = make(replicas=2)

        async def go(engine=engine, step=step):
            turns = [ask(engine, f"{i}/0", [i]) for i in range(10)]
            await asyncio.sleep(1)
            bad, good = cluster.up
            bad.broken = {step}
            await engine.load_weights(weights_of(1), 1)
            assert engine.stats.extra["replicas"] == 1 and good.version == 1
            for i, turn in enumerate(turns):
                check_turn(await turn, [i], LONG)
            await asyncio.sleep(60)
            assert bad.dead.is_set() and [server.version for server in cluster.up] == [1, 1]
            assert engine.stats.extra["replicas"] == 2
            assert [p.version_spans for p in await engine.probe(PROMPT, SHORT)] == [[(1, 4)]] * 2

        run_engine(engine, go())


def test_weights_are_sent_again_if_the_version_is_wrong(make, cluster):
    sync = ToySync()
    engine = make(replicas=2, sync=sync)

    async def go():
        cluster.up[0].ignored = 1
        await engine.load_weights(weights_of(1), 1)
        assert sync.sent == [(1, 2), (1, 1)] and engine.stats.extra["restarts"] == 0
        cluster.up[0].ignored = 2
        await engine.load_weights(weights_of(2), 2)
        await asyncio.sleep(60)
        assert engine.stats.extra["restarts"] == 1 and [server.version for server in cluster.up] == [2, 2]

    run_engine(engine, go())


def test_an_update_waits_for_the_restart_of_the_only_server(make, cluster):
    engine = make()

    async def go():
        cluster.up[0].broken = {"receive_folder"}
        await engine.load_weights(weights_of(1), 1)
        assert len(cluster.processes) == 2
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT, [1])

    run_engine(engine, go())


def test_a_server_that_dies_in_an_update_restarts_afterwards(make, cluster):
    """The restarted server was not paused by the update."""
    engine = make(replicas=2)
    cluster.start_seconds = 0

    async def go():
        await engine.generate("g/0", PROMPT, SHORT)
        updating = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await asyncio.sleep(0.2)
        cluster.up[0].dead.set()
        await updating
        await asyncio.sleep(60)
        assert [server.version for server in cluster.up] == [1, 1] and len(cluster.processes) == 3

    run_engine(engine, go())


def test_an_update_continues_after_its_caller_is_cancelled(make, cluster):
    engine = make(replicas=2)

    async def go():
        turns = [ask(engine, f"{i}/0", [i]) for i in range(4)]
        await asyncio.sleep(1)
        weights = weights_of(1)
        loading = asyncio.ensure_future(engine.load_weights(weights, 1))
        await asyncio.sleep(0.1)
        loading.cancel()
        await asyncio.sleep(0.01)
        weights["weight"].zero_()
        for i, turn in enumerate(turns):
            check_turn(await turn, [i], LONG, [0, 1])
        assert engine.version == 1 and [server.version for server in cluster.up] == [1, 1]

    run_engine(engine, go())


def test_servers_restart_after_an_update_that_the_event_loop_interrupted(make, cluster):
    """The weights of the servers are unknown afterwards, so the servers are restarted."""
    engine = make(replicas=2)

    left = []

    async def begin():
        left.append(asyncio.ensure_future(engine.load_weights(weights_of(1), 1)))
        await asyncio.sleep(0.2)

    async def go():
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT, [1])
        await asyncio.sleep(60)
        assert [server.version for server in cluster.up] == [1, 1]
        assert all(server.unpaused.is_set() for server in cluster.up)

    run_engine(engine, begin(), close=False)
    assert all(server.unpaused.is_set() for server in cluster.up)
    run_engine(engine, go())


def test_unsendable_weights_end_every_turn(make, cluster):
    sync = ToySync()
    engine = make(sync=sync)

    async def go():
        turn = ask(engine)
        await asyncio.sleep(1)
        sync.error = UserError("generator.toy.sync_folder=/full has no space left")
        for asking in (engine.load_weights(weights_of(1), 1), turn, engine.generate("g/0", PROMPT, SHORT)):
            with pytest.raises(UserError, match="no space left"):
                await asking

    run_engine(engine, go())


def test_tokens_of_unknown_weights_are_refused(make, cluster):
    """Another program has loaded these weights."""
    engine = make(replicas=2)

    async def go():
        await engine.load_weights(weights_of(1), 1)
        cluster.up[0].version = 9
        for i in range(4):
            check_turn(await engine.generate(f"{i}/0", [i], SHORT), [i], SHORT, [1])
        await asyncio.sleep(60)
        assert [server.version for server in cluster.up] == [1, 1] and engine.stats.extra["restarts"] == 1

    run_engine(engine, go())


@pytest.mark.parametrize("in_flight", ["continue", "drain"])
def test_adapters_change_without_a_pause_during_turns(make, cluster, in_flight):
    engine = make(replicas=2, sync=ToyAdapterSync(), in_flight=in_flight)

    async def go():
        turns = {}
        for version in range(4):
            if version:
                await engine.load_weights(weights_of(version), version)
            turns[version] = [ask(engine, f"{version}/{i}", [i]) for i in range(2)]
            await asyncio.sleep(0.1)
        begun = asyncio.get_running_loop().time()
        assert engine.version == 3
        for version, requested in turns.items():
            for i, turn in enumerate(requested):
                check_turn(await turn, [i], LONG, [version])
        assert asyncio.get_running_loop().time() - begun < 45 * TICK
        cluster.up[0].dead.set()
        await engine.load_weights(weights_of(3), 3)
        await asyncio.sleep(60)
        assert [server.adapters for server in cluster.up] == [{"policy-3": 3}] * 2
        assert [probe.version_spans for probe in await engine.probe(PROMPT, SHORT)] == [[(3, 4)]] * 2

    run_engine(engine, go())
