"""An engine of servers: no turn is lost or counted twice, and lost servers are restarted."""

import asyncio
from dataclasses import replace

import pytest
from toy_servers import (
    CONTEXT,
    LONG,
    PROMPT,
    SHORT,
    STOP,
    TICK,
    VOCABULARY,
    ask,
    check_turn,
    make_engine,
    run_engine,
    weights_of,
)

from mtrl.engines.server.engine import EngineClosedError
from mtrl.engines.server.server_api import ServerBusyError, ServerError, ServerRefusedError, ServerUnreachableError
from mtrl.engines.server.turns import TurnLostError
from mtrl.errors import UserError
from mtrl.types import FinishReason

# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_conversation_stays_on_the_server_that_cached_it(make, cluster):
    engine = make(replicas=2)

    async def go():
        context = PROMPT
        for turn in range(3):
            engine.open("g/0")
            answer = await engine.generate("g/0", context, replace(SHORT, seed=turn))
            check_turn(answer, context, SHORT, [0])
            assert answer.cached_tokens == (len(context) - 1 if turn else 0)
            context = [*context, *answer.token_ids, 9]
        engine.release("g/0")
        assert sorted(len(server.cache) for server in cluster.up) == [0, 3]
        stats = engine.stats
        assert (stats.prompt_tokens, stats.sampled_tokens) == (3 + 8 + 13, 12)
        assert stats.cached_tokens == 7 + 12
        assert stats.extra == {
            "retries": 0, "resent": 0, "restarts": 0, "sync_seconds": 0, "sync_bytes": 4, "waiting": 0, "replicas": 2,
        }  # fmt: skip

    run_engine(engine, go())
    assert not cluster.up


def test_limits_of_a_turn(make):
    engine = make()

    async def go():
        full = [1] * CONTEXT
        assert (await engine.generate("g/0", full, LONG)).finish == FinishReason.LENGTH
        almost = await engine.generate("g/0", full[:-3], LONG)
        assert (len(almost.token_ids), almost.finish) == (3, FinishReason.LENGTH)
        stops = replace(LONG, stop_token_ids=(STOP, 13, 21, 42))
        check_turn(await engine.generate("g/0", PROMPT, stops), PROMPT, stops)
        for prompt in ([1, VOCABULARY], [1, -1]):
            with pytest.raises(UserError, match="the prompt of g/0 has the token id .* at position 1, .* id is 49"):
                await engine.generate("g/0", prompt, LONG)
            with pytest.raises(UserError, match="the prompt of the canary has the token id"):
                await engine.probe(prompt, SHORT)

    run_engine(engine, go())


def test_backpressure_keeps_the_order(make, cluster):
    """One server samples 4 turns at once; 5 are sent."""
    engine, ended = make(), []

    async def turn(i):
        await engine.generate(f"{i}/0", [i], SHORT)
        ended.append(i)

    async def go():
        turns = [asyncio.ensure_future(turn(i)) for i in range(12)]
        await asyncio.sleep(TICK)
        assert engine.stats.extra["waiting"] == 7
        await asyncio.gather(*turns)
        assert [sorted(ended[i : i + 5]) for i in (0, 5, 10)] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
        assert cluster.up[0].most == 5

    run_engine(engine, go())


def test_release_ends_the_turn_of_a_hanging_server(make, cluster):
    engine = make()

    async def go():
        turn, waiting = ask(engine), [ask(engine, f"{i}/0") for i in range(5)]
        await asyncio.sleep(1)
        cluster.up[0].awake.clear()
        before = asyncio.get_running_loop().time()
        for name in ("g/0", "4/0"):
            engine.release(name)
        assert (await turn).finish == (await waiting[4]).finish == FinishReason.ABORT
        assert asyncio.get_running_loop().time() == before
        cluster.up[0].awake.set()
        for i in range(4):
            check_turn(await waiting[i], PROMPT, LONG, [0])
        assert len(cluster.processes) == 1

    run_engine(engine, go())


def test_a_trajectory_that_is_released_before_a_retry_is_not_assigned_again(make, cluster):
    engine = make(replicas=2)

    class Releasing(list):
        def pop(self, index):
            asyncio.get_running_loop().call_soon(engine.release, "g/0")
            return super().pop(index)

    async def go():
        for server in cluster.up:
            server.faults = Releasing([ServerUnreachableError("connection reset")])
        assert (await ask(engine)).finish == FinishReason.ABORT
        assert [replica.load.trajectories for replica in engine.server_group.replicas] == [0, 0]

    run_engine(engine, go())


def test_a_cancelled_turn_frees_its_slot(make, cluster):
    engine = make(max_num_seqs=1)

    async def go():
        turns = [ask(engine, f"{i}/0") for i in range(4)]
        await asyncio.sleep(1)
        turns[0].cancel(), turns[2].cancel()
        check_turn(await turns[3], PROMPT, LONG)
        check_turn(await turns[1], PROMPT, LONG)
        assert not cluster.up[0].running and turns[0].cancelled() and turns[2].cancelled()

    run_engine(engine, go())


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_server_that_dies_loses_no_turn(make, cluster, caplog):
    engine = make(replicas=2)

    async def go():
        turns = [ask(engine, f"{i}/0", [i]) for i in range(10)]
        await asyncio.sleep(1)
        await engine.load_weights(weights_of(1), 1)
        cluster.up[0].dead.set()
        for i, turn in enumerate(turns):
            check_turn(await turn, [i], LONG, [0, 1])
        assert engine.stats.sampled_tokens == 400 and engine.stats.prompt_tokens == 10
        assert engine.stats.extra["resent"] == engine.stats.extra["retries"] == 5
        await asyncio.sleep(60)
        assert engine.stats.extra["restarts"] == 1 and engine.stats.extra["replicas"] == 2
        assert [server.version for server in cluster.up] == [1, 1]

    run_engine(engine, go())
    assert "toy server 0 was killed by SIGKILL" in caplog.text and "restarted" in caplog.text


def test_a_hanging_server_is_restarted_and_a_slow_one_is_not(make, cluster):
    engine = make(replicas=2)

    async def go():
        turns = [ask(engine, f"{i}/0", [i]) for i in range(10)]
        await asyncio.sleep(1)
        slow, hanging = cluster.up
        slow.slow = 100
        hanging.awake.clear()
        begun = asyncio.get_running_loop().time()
        for i, turn in enumerate(turns):
            check_turn(await turn, [i], LONG, [0])
        await asyncio.sleep(60)
        assert hanging.dead.is_set() and not slow.dead.is_set()
        assert asyncio.get_running_loop().time() - begun < 600
        assert engine.stats.extra["restarts"] == 1

    run_engine(engine, go())


def test_a_sampling_server_is_alive_even_if_health_checks_fail(make, cluster):
    engine = make()

    async def go():
        cluster.up[0].broken = {"is_alive"}
        for _ in range(100):
            check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
            await asyncio.sleep(1)
        assert len(cluster.processes) == 1
        await asyncio.sleep(60)
        assert len(cluster.processes) > 1

    run_engine(engine, go())


@pytest.mark.parametrize("fault", [ServerUnreachableError("connection reset"), ServerError("HTTP 500 oops")])
def test_a_retried_turn_is_counted_once(make, cluster, fault):
    engine = make(retries=3)

    async def go():
        cluster.up[0].faults = [fault] * 3
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        assert engine.stats.extra["retries"] == 3 and engine.stats.extra["resent"] == 1
        assert engine.stats.sampled_tokens == 4 and engine.stats.prompt_tokens == 3
        cluster.up[0].faults = [fault] * 4
        with pytest.raises(TurnLostError, match=f"g/0: .* 4 attempts .*generator.toy.retries=3.*: {fault}"):
            await engine.generate("g/0", PROMPT, SHORT)
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        assert len(cluster.processes) == 1

    run_engine(engine, go())


def test_a_server_with_a_dead_worker_is_restarted(make, cluster):
    """The server answers every turn with 500 and fails its health checks; no turn is lost."""
    engine = make()

    async def go():
        cluster.up[0].broken |= {"generate", "is_alive"}
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        assert engine.stats.extra["restarts"] == 1

    run_engine(engine, go())


def test_every_server_is_probed(make, cluster):
    engine = make(replicas=2)

    async def go():
        cluster.up[0].faults = [ServerError("HTTP 500 oops")]
        assert len(await engine.probe(PROMPT, SHORT)) == 2
        cluster.up[0].dead.set()
        assert len(await engine.probe(PROMPT, SHORT)) in (1, 2), "one that is lost serves no more"

    run_engine(engine, go())


def test_an_overloaded_server_is_retried_until_the_request_timeout(make, cluster):
    engine = make(retries=0, request_timeout=600.0)

    async def go():
        cluster.up[0].faults = [ServerBusyError("HTTP 503 full")] * 12
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        cluster.up[0].faults = [ServerBusyError("HTTP 503 full")] * 1000
        with pytest.raises(TurnLostError, match="HTTP 503 full"):
            await engine.generate("g/0", PROMPT, SHORT)

    run_engine(engine, go())


def test_a_refused_turn_is_not_retried(make, cluster):
    engine = make()

    async def go():
        cluster.up[0].faults = [ServerRefusedError("HTTP 400 no")]
        with pytest.raises(ServerRefusedError, match="HTTP 400 no"):
            await engine.generate("g/0", PROMPT, SHORT)
        assert engine.stats.extra["retries"] == 0

    run_engine(engine, go())


def test_a_turn_that_times_out_is_retried_and_then_fails(make, cluster):
    engine = make(request_timeout=3.0, retries=1)

    async def go():
        with pytest.raises(TurnLostError, match="2 attempts .*no answer within 3 s"):
            await engine.generate("g/0", PROMPT, LONG)
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        assert not cluster.up[0].running

    run_engine(engine, go())


def test_too_many_deaths_of_a_server_end_the_run(make, cluster):
    engine = make(replicas=2, restarts=2)

    async def go():
        await engine.generate("g/0", PROMPT, SHORT)
        turns = [ask(engine, f"{i}/0") for i in range(20)]
        await asyncio.sleep(1)
        cluster.stillborn = 100
        for server in cluster.up:
            server.dead.set()
        message = "toy server . was .*generator.toy.restarts=2 times without a turn in between; check its arg"
        for turn in turns:
            with pytest.raises(UserError, match=message):
                await turn
        for asking in (
            engine.generate("g/0", PROMPT, SHORT),
            engine.load_weights(weights_of(1), 1),
            engine.probe([1], SHORT),
        ):
            with pytest.raises(UserError, match=message):
                await asking

    run_engine(engine, go())


def test_a_turn_between_deaths_resets_their_count(make, cluster):
    engine = make(restarts=1)

    async def go():
        for _ in range(4):
            cluster.up[0].dead.set()
            check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)
        assert engine.stats.extra["restarts"] == 4

    run_engine(engine, go())


def test_a_server_that_does_not_start_is_reported(monkeypatch, cluster, tmp_path):
    cluster.stillborn = 1
    with pytest.raises(UserError, match=r"toy server 0 cannot be used: it was killed .*its log is .*toy_0.log"):
        make_engine(monkeypatch, cluster, log_folder=tmp_path, replicas=2, args={"a": 1})
    assert not cluster.up
    cluster.start_seconds = 1000
    with pytest.raises(UserError, match=r"was not ready within generator.toy.start_timeout=600 s.*generator.toy.args="):
        make_engine(monkeypatch, cluster, log_folder=tmp_path)
    assert not cluster.up


# -- everything else --------------------------------------------------------------------------------------------------


def test_the_engine_works_on_consecutive_event_loops(make, cluster):
    engine = make(replicas=2)

    async def go(version):
        left = ask(engine, "left/0")
        await asyncio.sleep(0.2)
        await engine.load_weights(weights_of(version), version)
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT, [version])
        return left

    for version in range(1, 4):
        run_engine(engine, go(version), close=False)
    assert len(cluster.processes) == 2
    run_engine(engine, go(4))


def test_a_server_that_died_between_event_loops_is_restarted(make, cluster):
    engine = make()

    async def go():
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT)

    run_engine(engine, go(), close=False)
    cluster.processes[0].server.dead.set()
    run_engine(engine, go())


def test_close_aborts_turns_and_ends_servers(make, cluster):
    engine = make(replicas=2)

    async def go():
        turns = [ask(engine, f"{i}/0") for i in range(20)]
        await asyncio.sleep(1)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        cluster.up[0].awake.clear()
        await asyncio.sleep(0.1)
        await engine.close()
        assert {(await turn).finish for turn in turns} == {FinishReason.ABORT}
        with pytest.raises((EngineClosedError, asyncio.CancelledError)):
            await loading
        with pytest.raises(EngineClosedError):
            await engine.generate("g/0", PROMPT, SHORT)

    run_engine(engine, go())
    assert not cluster.up


def test_sleep_and_wake(make, cluster):
    engine = make(replicas=2)

    async def go():
        turns = [ask(engine, f"{i}/0", [i]) for i in range(4)]
        await asyncio.sleep(1)
        await engine.sleep()
        for i, turn in enumerate(turns):
            check_turn(await turn, [i], LONG, [0])
        cluster.up[0].dead.set()
        later = ask(engine)
        await asyncio.sleep(100)
        assert [server.asleep for server in cluster.up] == [True], "the dead one would take the trainer's memory"
        await engine.wake()
        await engine.load_weights(weights_of(1), 1)
        check_turn(await later, PROMPT, LONG, [1])
        await asyncio.sleep(100)
        assert [server.version for server in cluster.up] == [1, 1]

    run_engine(engine, go())


def test_sleep_ends_a_server_that_is_starting(make, cluster):
    engine = make(replicas=2)

    async def go():
        cluster.up[0].dead.set()
        await asyncio.sleep(5)  # it is being started again
        await engine.sleep()
        await asyncio.sleep(100)
        assert [server.asleep for server in cluster.up] == [True]
        await engine.wake()
        await engine.load_weights(weights_of(1), 1)
        await asyncio.sleep(200)
        assert [server.version for server in cluster.up] == [1, 1]

    run_engine(engine, go())


def test_an_unknown_pause_mode_is_refused(monkeypatch, cluster):
    with pytest.raises(
        UserError, match="generator.toy.pause_mode=keep does not exist; choose one of abort, continue, drain"
    ):
        make_engine(monkeypatch, cluster, pause_mode="keep")
    assert not cluster.processes


def test_versions_can_be_renumbered(make):
    engine = make()

    async def go():
        engine.version = 70
        answer = await engine.generate("g/0", PROMPT, SHORT)
        assert engine.version == 70 and answer.version_spans == [(70, 4)]
        await engine.load_weights(weights_of(71), 71)
        assert engine.version == 71
        check_turn(await engine.generate("g/0", PROMPT, SHORT), PROMPT, SHORT, [71])

    run_engine(engine, go())
