"""The engine in a separate process: the same turns, and no turn is lost when a process is killed."""

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from engine_processes import (
    CONTEXT,
    ENDLESS,
    PROMPT,
    SHORT,
    ForkedChild,
    ask,
    has_ended,
    make_engine,
    run,
    state,
    wait_until,
)
from toy_model import VOCABULARY, ToyLM, check_generation, weights_of

from mtrl.engines.base import SamplingParams
from mtrl.engines.local import process
from mtrl.engines.local.block import Block
from mtrl.engines.local.channel import Channel
from mtrl.engines.local.child import Child
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.messages import Load
from mtrl.engines.local.process import EngineProcessError, ProcessEngine
from mtrl.errors import UserError
from mtrl.types import FinishReason
from mtrl.utils.signals import SIGNALS
from tests import forked

pytestmark = [pytest.mark.xdist_group("engine_process"), pytest.mark.usefixtures("forked_children")]


@pytest.fixture(scope="module")
def shared():
    """Most tests share a process, which outlives the event loops of the tests. (It is made before `forked_children`;
    `test_turns_equal_those_of_the_engine_in_this_process` starts one with an interpreter of its own.)"""
    with mock.patch.object(process, "Child", ForkedChild):
        engine = make_engine()
    yield engine
    run(engine.close())
    assert has_ended(engine.pid)


@pytest.fixture
def engine(shared):
    run(shared.load_weights(weights_of(0), 0))
    return shared


async def until_sampling(engine, version=0):
    """Return in the middle of the turns that were asked for: an answer comes between two tokens."""
    await engine.load_weights(weights_of(version), version)
    await engine.load_weights(weights_of(version), version)


# -- the same turns ---------------------------------------------------------------------------------------------------


def test_turns_equal_those_of_the_engine_in_this_process(make_tiny_model, tiny_tokenizer, sample_turns, monkeypatch):
    """Tokens and log-probs to the last bit, with the fused step, stop strings and deterministic batches."""
    monkeypatch.setattr(process, "Child", Child)
    model = make_tiny_model()
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    engine = ProcessEngine(EngineMemory(model, tiny_tokenizer, 5, 200))
    assert all(
        value.data_ptr() == before[name][0] and torch.equal(value, before[name][1]) and not value.is_shared()
        for name, value in model.state_dict().items()
    ), "the trainer's module stays as it is"
    prompts = [[1, 2, 3]] * 3 + [[7] * 20, [60, 9]]
    sampling = SamplingParams(max_generate_length=12, temperature=0.8, stop=("e", "4"))
    theirs = sample_turns(engine, prompts, sampling=sampling)
    ours = sample_turns(local := LocalEngine(model, tiny_tokenizer, 5, 200), prompts, sampling=sampling)
    assert theirs == ours
    assert engine.stats == local.stats and engine.stats.cached_tokens > 0


def test_a_full_context_and_a_second_request_of_a_trajectory(engine):
    full = run(engine.generate("a", [1] * 10**6, SHORT))  # more than a socket takes at once
    assert (full.token_ids, full.finish) == ([], FinishReason.LENGTH)

    async def twice():
        first = ask(engine, "a")
        await asyncio.sleep(0)
        with pytest.raises(EngineProcessError, match="AssertionError: a requests a turn before its last one ended"):
            await engine.generate("a", PROMPT, SHORT)
        engine.release("a")
        return await first

    assert run(twice()).finish == FinishReason.ABORT


def test_release_returns_the_tokens_sampled_so_far(engine):
    async def go():
        turn, other = ask(engine, "a"), ask(engine, "b")
        await until_sampling(engine)
        engine.release("a")
        aborted = await turn
        assert not other.done()
        engine.open("a")  # as a retry does
        again = await engine.generate("a", PROMPT, SHORT)
        engine.release("b")
        return aborted, again, await other

    aborted, again, other = run(go())
    assert aborted.finish == other.finish == FinishReason.ABORT and aborted.token_ids
    check_generation(PROMPT, aborted)
    both = min(len(again.token_ids), len(aborted.token_ids))  # the turn may be aborted at its first token
    assert again.token_ids[:both] == aborted.token_ids[:both]


def test_a_cancelled_request_ends_with_its_release(engine):
    async def go():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("a", PROMPT, ENDLESS), 0.01)
        engine.release("a")
        return await engine.generate("b", PROMPT, SHORT)

    assert len(run(go()).token_ids) == 4


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_change_during_turns(engine):
    async def go():
        turns = [ask(engine, name) for name in "abc"]
        await until_sampling(engine)
        for version in (1, 2, 3):
            await engine.load_weights(weights_of(version), version)
            assert engine.version == version
        await until_sampling(engine, 3)
        for name in "abc":
            engine.release(name)
        return await asyncio.gather(*turns)

    for turn in run(go()):
        assert [version for version, _ in turn.version_spans] == [0, 1, 2, 3]
        check_generation(PROMPT, turn)


def test_a_cancelled_load_does_not_corrupt_weights(engine):
    """The next weights are written only after the child has read these."""

    async def go():
        turn = ask(engine, "a")
        for version in range(1, 20):
            loading = asyncio.ensure_future(engine.load_weights(weights_of(version), version))
            await asyncio.sleep(0.001)
            loading.cancel()
        await until_sampling(engine, 20)
        engine.release("a")
        return await turn

    turn = run(go())
    check_generation(PROMPT, turn)
    assert turn.version_spans[-1][0] == 20


def test_the_number_of_a_version_can_be_set(engine):
    """A resumed run that has loaded its weights sets the version."""
    engine.version = 12
    turn = run(engine.generate("a", PROMPT, SHORT))
    assert turn.version_spans == [(12, 4)] and engine.version == 12


def test_draining_across_processes(monkeypatch):
    engine, sent, send = make_engine(in_flight="drain"), asyncio.Event(), Channel.send

    def noting(channel, message):
        send(channel, message)
        if isinstance(message, Load):
            sent.set()

    monkeypatch.setattr(Channel, "send", noting)

    async def go():
        early = ask(engine, "early", sampling=SamplingParams(max_generate_length=200))
        await engine.generate("along", PROMPT, SHORT)  # so that the early one is being sampled, or has been
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await sent.wait()
        late = ask(engine, "late", sampling=SHORT)
        await loading
        assert early.done()
        turns = await early, await late
        endless = ask(engine, "endless")
        await asyncio.sleep(0)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(2), 2))
        engine.release("endless")
        await loading
        await endless
        await engine.close()
        return turns

    early, late = run(go())
    assert (early.version_spans, late.version_spans) == ([(0, 200)], [(1, 4)])
    check_generation(PROMPT, late)


def test_weights_of_another_model_end_the_engine():
    """The error names the missing weights, and later requests raise it too."""
    engine = make_engine()
    weights = weights_of(1)
    del weights["positions.weight"]

    async def go():
        with pytest.raises(EngineProcessError, match=r"do not fit ToyLM: no weights for positions.weight"):
            await engine.load_weights(weights, 1)
        with pytest.raises(EngineProcessError, match=r"positions.weight"):
            await engine.generate("a", PROMPT, SHORT)
        await engine.close()
        with pytest.raises(EngineProcessError, match="the engine is closed"):
            await engine.generate("a", PROMPT, SHORT)

    run(go())
    assert engine.version == 0 and has_ended(engine.pid)


# -- deaths -----------------------------------------------------------------------------------------------------------


def test_signals_to_the_group_do_not_end_the_child(engine):
    pid = engine.pid
    assert os.getpgid(pid) != os.getpgid(0)
    for number in SIGNALS:
        os.kill(pid, number)
    assert len(run(engine.generate("a", PROMPT, SHORT)).token_ids) == 4
    assert engine.pid == pid


def test_a_process_killed_during_turns_and_updates_is_replaced(engine):
    """Turns are requested again under the newest weights, and open trajectories are announced again."""

    async def go():
        expected = [await engine.generate(f"x{i}", PROMPT, SamplingParams(30, seed=i)) for i in range(3)]
        for i in range(3):
            engine.release(f"x{i}")
        engine.open("idle")
        long, lost = ask(engine, "long", sampling=SamplingParams(1000)), ask(engine, "lost")
        await until_sampling(engine)
        before = engine.stats
        os.kill(engine.pid, signal.SIGKILL)
        engine.release("lost")
        again = await asyncio.gather(*(engine.generate(f"y{i}", PROMPT, SamplingParams(30, seed=i)) for i in range(3)))
        assert [g.token_ids for g in again] == [g.token_ids for g in expected]
        assert (await long).version_spans == [(0, len((await long).token_ids))]
        assert (await lost).finish == FinishReason.ABORT
        assert engine.stats.sampled_tokens > before.sampled_tokens and engine.stats.extra["restarts"] == 1
        await engine.generate("idle", PROMPT, SHORT)

        turn = ask(engine, "turn", sampling=SamplingParams(1500))
        await until_sampling(engine)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(5), 5))
        os.kill(engine.pid, signal.SIGKILL)
        await loading
        assert engine.version == 5
        return await long, await turn

    long, turn = run(go())
    check_generation(PROMPT, long)
    check_generation(PROMPT, turn)
    assert turn.version_spans == [(5, len(turn.token_ids))]


def test_a_new_process_reads_its_weights_before_newer_ones_are_written(engine, monkeypatch):
    """A load that begins while the new process starts waits for it, so that no turn is sampled by a mixture."""
    slow, write = [1.0], Block.write

    def write_slowly(block, tensors):
        write(block, tensors)
        time.sleep(slow.pop() if slow else 0)

    async def go():
        turn = ask(engine, "a", sampling=SamplingParams(max_generate_length=3000))
        await until_sampling(engine)
        monkeypatch.setattr(Block, "write", write_slowly)
        before = engine.pid
        os.kill(before, signal.SIGKILL)
        while engine.pid == before:
            await asyncio.sleep(0)
        await engine.load_weights(weights_of(1), 1)
        await until_sampling(engine, 1)
        engine.release("a")
        return await turn

    check_generation(PROMPT, run(go()))


def test_deterministic_batches_continue_after_a_restart(sample_turns):
    """Open trajectories are announced to the new process in their order, so that no turn waits forever."""
    prompts = [PROMPT] * 3 + [[7] * 20, [30, 9]]
    engine = make_engine(deterministic=True)
    killed = []

    def pause(i, turn):
        if (i, turn) == (3, 1):
            killed.append(engine.pid)
            os.kill(engine.pid, signal.SIGKILL)
        return 0

    theirs = sample_turns(engine, prompts, pause=pause)
    ours = sample_turns(LocalEngine(ToyLM(), None, 8, CONTEXT), prompts)
    assert killed and engine.pid not in killed
    assert {i: [g.token_ids for g in t] for i, t in theirs.items()} == {
        i: [g.token_ids for g in t] for i, t in ours.items()
    }


def test_the_engine_ends_if_the_event_loop_ends_during_a_load(monkeypatch):
    """The contents of the block are unknown, so no turn may be sampled."""
    engine = make_engine()
    ended, write = threading.Event(), Block.write

    def write_late(block, tensors):
        assert ended.wait(20)
        write(block, tensors)

    monkeypatch.setattr(Block, "write", write_late)

    async def leave():
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        loading.add_done_callback(lambda _: ended.set())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return loading

    assert run(leave()).cancelled()
    with pytest.raises(EngineProcessError, match="event loop ended while weights were loaded"):
        run(engine.generate("a", PROMPT, SHORT))
    assert has_ended(engine.pid)


def test_a_hanging_process_is_replaced(engine, caplog):
    async def go():
        os.kill(engine.pid, signal.SIGSTOP)
        wait_until(lambda: state(engine.pid) == "T")
        engine.timeout = 0.2
        turn = ask(engine, "a", sampling=SHORT)
        await asyncio.sleep(0)  # schedules the check of the stopped child
        engine.timeout = 600  # for the next child
        return await turn

    assert len(run(go()).token_ids) == 4
    assert "sent no message for" in caplog.text


def test_repeated_deaths_of_the_process_end_in_one_error():
    engine = make_engine()

    async def kill_on_sight():
        killed = set()
        while len(killed) < 3:
            if engine.pid not in killed:
                killed.add(engine.pid)
                os.kill(engine.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)

    async def go():
        calls = [ask(engine, "a"), ask(engine, "b"), engine.load_weights(weights_of(1), 1), kill_on_sight()]
        return await asyncio.gather(*calls, return_exceptions=True)

    *errors, _ = run(go())
    for error in errors:
        assert isinstance(error, UserError) and "died 3 times without an answer" in str(error)
        assert "killed by SIGKILL" in str(error)
    run(engine.close())


PARENT = """
import asyncio, sys
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.messages import Load
from mtrl.engines.local.process import ProcessEngine
from toy_model import ToyLM

async def main():  # without a main guard
    engine = ProcessEngine(EngineMemory(ToyLM(), None, max_context_length=4000, deterministic=False))
    print(engine.pid, flush=True)
    while True:
        await engine.generate("a", [1], SamplingParams(max_generate_length=3900))

asyncio.run(main())
"""


def test_the_child_ends_with_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with forked.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.kill()
        wait_until(lambda: has_ended(pid))


def test_close_aborts_running_turns(caplog):
    engine = make_engine()

    async def go():
        turns = [ask(engine, name) for name in "abc"]
        await until_sampling(engine)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineProcessError, match="closed"):
            await loading
        return await asyncio.gather(*turns)

    assert [turn.finish for turn in run(go())] == [FinishReason.ABORT] * 3
    assert has_ended(engine.pid)
    run(engine.close())  # once more does no harm
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- any order of events ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_interleavings(engine):
    """80 random orders of turns, releases, new weights and kills: every token is its version's, all comes to an end,
    and every turn is answered."""
    spans = run(in_rounds(engine, random.Random(0)), 300)
    assert len(spans) > 200 and sum(len(s) > 1 for s in spans) > 20, "or nothing happened in the middle of turns"


async def in_rounds(engine, rng, rounds=80, kills=(20, 50)):
    spans, version = [], 0
    for number in range(rounds):
        turns, loads = {}, []
        for _ in range(rng.randint(2, 8)):
            event = rng.random()
            if event < 0.6:
                name = f"{number}/{len(turns)}"
                prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
                sampling = SamplingParams(rng.randint(1, 60), seed=rng.randrange(99))
                turns[name] = prompt, ask(engine, name, prompt, sampling), engine.version
            elif event < 0.7 and turns:
                engine.release(rng.choice(list(turns)))
            elif event < 0.9:
                version += 1
                loads.append(asyncio.ensure_future(engine.load_weights(weights_of(version % 30), version)))
            await asyncio.sleep(rng.choice([0, 0, 0.002, 0.01]))
        if number in kills:
            os.kill(engine.pid, signal.SIGKILL)
        for name, (prompt, turn, asked_at) in turns.items():
            generation = await turn
            engine.release(name)
            spans.append(generation.version_spans)
            of_weights = [(v % 30, count) for v, count in generation.version_spans]
            check_generation(prompt, replace(generation, version_spans=of_weights))
            versions = [v for v, _ in generation.version_spans]
            assert versions == sorted(set(versions)) and all(asked_at <= v <= version for v in versions)
            assert generation.finish == FinishReason.ABORT or generation.token_ids
        await asyncio.gather(*loads)
        assert engine.version == version
    return spans
