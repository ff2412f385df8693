"""Whatever happens to servers and whenever: each turn is sampled once and whole, by weights that it says, or one clear
error ends all."""

import asyncio
import random
from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toy_servers import CONTEXT, LONG, STOP, Cluster, check_turn, make_engine, run_engine, weights_of

from mtrl.engines.base import SamplingParams
from mtrl.engines.server.server_api import ServerBusyError, ServerError, ServerUnreachableError
from mtrl.engines.server.turns import TurnLostError
from mtrl.errors import UserError
from mtrl.types import FinishReason

STEPS = (
    "pause",
    "begin_update",
    "receive_folder",
    "end_update",
    "drop_cache",
    "version",
    "resume",
    "generate",
    "is_alive",
)
ERRORS = (ServerUnreachableError("reset"), ServerError("HTTP 500"), ServerBusyError("HTTP 503"))


class Story:
    """Requests to an engine, their results, and the expected results."""

    def __init__(self, engine, cluster, replicas, seed):
        self.engine, self.cluster, self.replicas, self.random = engine, cluster, replicas, random.Random(seed)
        self.loaded, self.requested = [0], 0
        self.counts = Counter()
        self.errors = []

    async def trajectory(self, i):
        await asyncio.sleep(self.random.uniform(0, 60))
        context = [i % 50, 3]
        try:
            for turn in range(self.random.randint(1, 4)):
                sampling = SamplingParams(self.random.randint(1, 40), stop_token_ids=(STOP,), seed=turn)
                context = await self.turn(f"{i // 4}/{i % 4}", context, sampling)
        except (TurnLostError, UserError) as error:
            self.errors.append(error)
        finally:
            self.engine.release(f"{i // 4}/{i % 4}")

    async def turn(self, name, context, sampling):
        known = self.loaded[-1]
        asking = asyncio.ensure_future(self.engine.generate(name, context, sampling))
        fate = self.random.random()
        if fate < 0.1:
            await asyncio.sleep(self.random.uniform(0, 20))
            (asking.cancel if fate < 0.05 else lambda: self.engine.release(name))()
        try:
            answer = await asking
        except asyncio.CancelledError:
            return context
        if answer.finish == FinishReason.ABORT:
            assert fate < 0.1
            return context
        if len(context) >= CONTEXT:
            assert not answer.token_ids
            return context
        check_turn(answer, context, sampling)
        assert min(version for version, _ in answer.version_spans) >= known, "it was asked for after newer weights"
        assert max(version for version, _ in answer.version_spans) <= self.requested
        self.counts.update(prompt=len(context), sampled=len(answer.token_ids))
        return [*context, *answer.token_ids, 11]

    async def updates(self, pauses):
        for pause in pauses:
            await asyncio.sleep(pause)
            self.requested += 1
            version = self.requested
            try:
                await self.engine.load_weights(weights_of(version), version)
            except UserError as error:
                self.errors.append(error)
                return
            self.loaded.append(version)

    async def fault(self, after, kind, which):
        await asyncio.sleep(after)
        if not self.cluster.up:
            return
        server = self.cluster.up[which % len(self.cluster.up)]
        match kind:
            case "dies":
                server.dead.set()
            case "hangs":
                server.awake.clear()
            case "stalls":
                server.awake.clear()
                await asyncio.sleep(8)
                server.awake.set()
            case "slow":
                server.slow = 20
            case "errors":
                server.faults = [ERRORS[which % 3]] * (1 + which % 4)
            case "ignores":
                server.ignored += 1 + which % 3
            case "breaks":
                server.broken = {STEPS[which % len(STEPS)]}
                await asyncio.sleep(15)
                server.broken = set()

    async def report(self, faults, pauses):
        await asyncio.gather(
            *(self.trajectory(i) for i in range(16)), self.updates(pauses), *(self.fault(*fault) for fault in faults)
        )
        stats = self.engine.stats
        assert (stats.prompt_tokens, stats.sampled_tokens) == (self.counts["prompt"], self.counts["sampled"])
        assert stats.extra["waiting"] == 0
        assert all(process.server.stale == 0 for process in self.cluster.processes)
        await asyncio.sleep(900)
        for server in self.cluster.up:
            server.faults = []
        try:
            turns = await self.engine.probe([1, 2], LONG)
        except UserError as error:
            assert "generator.toy.restarts=3 times without a turn in between" in str(error)
            return
        assert not any(isinstance(error, UserError) for error in self.errors)
        newest = self.loaded[-1]
        assert [server.version for server in self.cluster.up] == [newest] * len(turns)
        assert self.engine.stats.extra["replicas"] == len(turns) == self.replicas
        assert all({version for version, _ in turn.version_spans} == {newest} for turn in turns)


NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""Phases without shrinking: a smaller example has other events, and shrinking would take minutes."""
kinds = st.sampled_from(["dies", "hangs", "stalls", "slow", "errors", "ignores", "breaks"])
faults = st.lists(st.tuples(st.floats(0, 120), kinds, st.integers(0, 50)), max_size=8)


@settings(
    max_examples=12, deadline=None, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    faults=faults,
    pauses=st.lists(st.floats(0, 40), max_size=4),
    mode=st.sampled_from(["continue", "drain", "abort", "in_place"]),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_no_turn_is_lost_or_counted_twice(monkeypatch, virtual_time, faults, pauses, mode, replicas, seed):
    cluster = Cluster()
    limits = {"max_num_seqs": 3, "request_timeout": 120.0, "sync_timeout": 20.0}
    engine = make_engine(monkeypatch, cluster, replicas=replicas, pause_mode=mode, **limits)
    run_engine(engine, Story(engine, cluster, replicas, seed).report(faults, pauses))
    assert not cluster.up
