"""Several engine processes with one model: the same turns, one memory of weights, and no turn is lost."""

import asyncio
import os
import signal

import pytest
from engine_processes import CONTEXT, PROMPT, SHORT, ForkedChild, has_ended, run
from hypothesis import given
from hypothesis import strategies as st
from toy_model import Refused, ToyLM, check_generation, weights_of

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.child import environment_of
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.process import EngineProcessError
from mtrl.engines.local.replicas import ReplicatedEngine, replica_of
from mtrl.errors import UserError

pytestmark = [pytest.mark.xdist_group("engine_process"), pytest.mark.usefixtures("forked_children")]

LONG = SamplingParams(max_generate_length=1500)


def replicated(replicas=2, model=None, deterministic=False):
    return ReplicatedEngine(EngineMemory(model or ToyLM(), None, 8, CONTEXT, deterministic=deterministic), replicas)


def names(groups, size=2):
    return [f"step0/{group}/{index}" for group in range(groups) for index in range(size)]


def test_replicas_of_worked_names():
    worked = {"step0/3/1": 1, "step12/4/0": 0, "step0/7+/0": 1, "step0/6~/5": 0, "eval0/greedy/11/0": 1}
    assert {name: replica_of(name, 2) for name in worked} == worked
    assert replica_of("step3/5/0", 3) == 2
    assert replica_of("talk/0", 4) == replica_of("talk/1", 4) in range(4)


@given(st.text(), st.integers(1, 9), st.integers(0, 99), st.integers(0, 99))
def test_trajectories_of_a_group_have_one_replica(group, replicas, one, other):
    assert replica_of(f"{group}/{one}", replicas) == replica_of(f"{group}/{other}", replicas) in range(replicas)


@given(st.integers(1, 8), st.integers(0, 1000), st.integers(1, 50))
def test_consecutive_groups_are_divided_evenly(replicas, first, count):
    counts = [0] * replicas
    for number in range(first, first + count):
        counts[replica_of(f"step1/{number}/0", replicas)] += 1
    assert max(counts) - min(counts) <= 1


def test_turns_equal_those_of_an_engine_with_the_same_groups():
    """Tokens and log-probs to the last bit, with deterministic batches; the model is in memory once."""

    async def sample(engine, chosen):
        for name in chosen:
            engine.open(name)
        turns = [engine.generate(name, [*PROMPT, int(name[-1])], SamplingParams(20, seed=7)) for name in chosen]
        return dict(zip(chosen, await asyncio.gather(*turns), strict=True))

    everything = names(4)
    engine = replicated(deterministic=True)
    theirs = run(sample(engine, everything))
    for replica in range(2):
        chosen = [name for name in everything if replica_of(name, 2) == replica]
        ours = run(sample(LocalEngine(ToyLM(), None, 8, CONTEXT), chosen))
        assert ours == {name: theirs[name] for name in chosen}
    assert engine.stats.sampled_tokens == 20 * len(everything)
    run(engine.close())
    assert all(map(has_ended, engine.pids))


def test_new_weights_reach_every_replica_although_one_is_killed():
    engine = replicated(3)

    async def go():
        turns = {name: asyncio.ensure_future(engine.generate(name, PROMPT, LONG)) for name in names(6, 1)}
        for version in range(1, 6):
            loading = asyncio.ensure_future(engine.load_weights(weights_of(version), version))
            await asyncio.sleep(0.01)
            if version in (2, 4):
                os.kill(engine.pids[version % 3], signal.SIGKILL)
            await loading
            assert engine.version == version
        short = await asyncio.gather(*(engine.generate(f"after/{i}/0", PROMPT, SHORT) for i in range(3)))
        assert [turn.version_spans for turn in short] == [[(5, 4)]] * 3
        return await asyncio.gather(*turns.values())

    for turn in run(go()):
        assert len(turn.token_ids) == 1500
        check_generation(PROMPT, turn)
    assert engine.stats.extra["restarts"] == 2
    run(engine.close())


def test_the_number_of_a_version_can_be_set():
    engine = replicated()
    engine.version = 12
    turn = run(engine.generate("a/1/0", PROMPT, SHORT))
    assert turn.version_spans == [(12, 4)] and engine.version == 12
    run(engine.close())
    with pytest.raises(EngineProcessError, match="the engine is closed"):
        run(engine.generate("a/1/0", PROMPT, SHORT))


def test_weights_that_cannot_be_written_are_never_read(monkeypatch):
    """A replica that is restarted after a failed write would read an incomplete set."""
    engine = replicated()

    async def go():
        await engine.load_weights(weights_of(1), 1)
        monkeypatch.setattr("mtrl.engines.local.block.Block.write", lambda block, weights: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await engine.load_weights(weights_of(2), 2)
        turn = await engine.generate("a/0/0", PROMPT, SHORT)
        assert turn.version_spans == [(1, 4)]
        check_generation(PROMPT, turn)
        os.kill(engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineProcessError, match="the newest weights could not be written"):
            await engine.generate("a/2/0", PROMPT, SHORT)
        await engine.close()

    run(go())


def test_a_failed_start_of_one_ends_all():
    with pytest.raises(UserError, match="generator.backend=local cannot run Refused"):
        replicated(model=Refused())


def test_each_process_on_gpus_sees_one_of_them(monkeypatch):
    """The processes get the GPUs in order by the names that this process sees; no GPU is needed to start them."""
    seen = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")

    class Noted(ForkedChild):
        def __init__(self, threads, gpu=None):
            seen[gpu] = environment_of(threads, gpu)["CUDA_VISIBLE_DEVICES"]
            super().__init__(threads, gpu)

    monkeypatch.setattr("mtrl.engines.local.process.Child", Noted)
    run(ReplicatedEngine(EngineMemory(ToyLM(), None, 8, CONTEXT), 2, on_gpus=True).close())
    assert seen == {0: "5", 1: "GPU-7"} and environment_of(1, None)["CUDA_VISIBLE_DEVICES"] == "5,GPU-7"
