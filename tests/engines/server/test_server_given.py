"""External servers at given URLs: they are used and supervised, but never ended."""

import asyncio

import pytest
from toy_servers import (
    LONG,
    PROMPT,
    SHORT,
    ask,
    check_turn,
    make_engine,
    run_engine,
    weights_of,
)

from mtrl.errors import UserError

URLS = ["http://127.0.0.1:91", "http://127.0.0.1:92"]


async def start_given(cluster):
    cluster.start_seconds = 0
    for url in URLS:
        cluster.new_server(url).begun = -1e9


@pytest.fixture
def given(make, cluster):
    def given(**settings):
        asyncio.run(start_given(cluster))
        return make(urls=URLS, **settings)

    return given


def test_external_servers_are_used_and_not_ended(given, cluster):
    engine = given()

    async def go():
        assert engine.stats.extra["replicas"] == 2
        await engine.load_weights(weights_of(1), 1)
        for i in range(4):
            check_turn(await engine.generate(f"{i}/0", [i], SHORT), [i], SHORT, [1])

    run_engine(engine, go())
    assert not cluster.processes and not any(server.dead.is_set() for server in cluster.servers.values())


def test_a_restarted_external_server_gets_the_weights_before_turns(given, cluster):
    engine = given()

    async def go():
        await engine.load_weights(weights_of(1), 1)
        turns = [ask(engine, f"{i}/0", [i]) for i in range(10)]
        await asyncio.sleep(1)
        cluster.servers[URLS[0]].dead.set()
        for i, turn in enumerate(turns):
            check_turn(await turn, [i], LONG, [1])
        await asyncio.sleep(100)
        assert engine.stats.extra["replicas"] == 1
        cluster.new_server(URLS[0])
        await asyncio.sleep(100)
        assert engine.stats.extra["replicas"] == 2 and cluster.servers[URLS[0]].version == 1

    run_engine(engine, go())


def test_a_lost_external_server_ends_the_run(given, cluster):
    engine = given()

    async def go():
        await engine.generate("g/0", PROMPT, SHORT)
        cluster.servers[URLS[0]].dead.set()
        await asyncio.sleep(700)
        with pytest.raises(
            UserError, match=r"the server http://127.0.0.1:91 .*start_timeout=600 s; check that it runs"
        ):
            await engine.generate("g/0", PROMPT, SHORT)

    run_engine(engine, go())


def test_an_external_server_that_fails_an_update_ends_the_run(given, cluster):
    engine = given()

    async def go():
        cluster.servers[URLS[1]].broken = {"receive_folder"}
        turn = ask(engine)
        for asking in (engine.load_weights(weights_of(1), 1), turn):
            with pytest.raises(UserError, match="the server http://127.0.0.1:92 .*HTTP 500 receive_folder is broken; "):
                await asking

    run_engine(engine, go())


def test_external_servers_with_different_weights_are_refused(monkeypatch, cluster):
    asyncio.run(start_given(cluster))
    cluster.servers[URLS[1]].version = 5
    with pytest.raises(UserError, match="different versions .*:91 has 0, .*:92 has 5"):
        make_engine(monkeypatch, cluster, urls=URLS)
