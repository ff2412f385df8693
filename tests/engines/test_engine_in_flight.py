"""Weight updates of an engine that is sampling: exact versions, and no keys of older weights."""

import asyncio
import random
import threading

import pytest
import torch
from toy_model import VOCABULARY, ToyLM, check_generation, logprobs_of, weights_of

from mtrl.distributed.gathered import GatheredWeights
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine, copy_weights
from mtrl.types import FinishReason

PROMPT = [3, 1, 4, 1, 5]
LONG = SamplingParams(max_generate_length=60)


def run(coroutine):
    torch.set_num_threads(1)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def steps(count):
    for _ in range(count):
        await asyncio.sleep(0)


def ask(engine, name, prompt=PROMPT, sampling=LONG):
    return asyncio.ensure_future(engine.generate(name, prompt, sampling))


def make_engine(in_flight="continue", slots=8, **settings):
    return LocalEngine(ToyLM(), None, slots, 300, deterministic=False, in_flight=in_flight, **settings)


# -- continue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_a_turn_continues_under_new_weights(make_tiny_model, fuse):
    old, new = make_tiny_model(0), make_tiny_model(1)
    engine = LocalEngine(make_tiny_model(0), None, 8, 200, fuse, deterministic=False)

    async def go():
        turn = ask(engine, "a")
        await steps(20)
        await engine.load_weights(new.state_dict(), 7)
        return await turn

    turn = run(go())
    (first, before), (second, after) = turn.version_spans
    assert (first, second, before + after) == (0, 7, 60) and 10 < before < 30
    got, ids = torch.tensor(turn.logprobs), turn.token_ids
    torch.testing.assert_close(got[:before], full_logprobs(old, ids)[:before], atol=1e-4, rtol=0)
    torch.testing.assert_close(got[before:], full_logprobs(new, ids)[before:], atol=1e-4, rtol=0)
    assert (got[before:] - full_logprobs(old, ids)[before:]).abs().max() > 0.1, "or the policies are the same"
    fresh = LocalEngine(new, None, 8, 200, deterministic=False)
    rest = run(fresh.generate("a", PROMPT + ids[:before], SamplingParams(max_generate_length=after)))
    assert rest.token_ids == ids[before:], "the random stream goes on where it was"


def full_logprobs(model, ids):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)


def test_every_change_during_a_turn_is_a_span():
    engine = make_engine()

    async def go():
        turns = [ask(engine, name) for name in "abc"]
        for version in (1, 2, 2, 3):
            await steps(8)
            await engine.load_weights(weights_of(version), version)
        return await asyncio.gather(*turns)

    for turn in run(go()):
        assert [version for version, _ in turn.version_spans] == [0, 1, 2, 3]
        check_generation(PROMPT, turn)
        assert turn.cached_tokens in (0, len(PROMPT) - 1), "as it was when the turn began"


def test_a_trajectory_between_turns_is_prefilled_again():
    engine = make_engine()

    async def go():
        first = await ask(engine, "a", sampling=SamplingParams(max_generate_length=5))
        await engine.load_weights(weights_of(1), 1)
        context = PROMPT + first.token_ids + [9]
        return context, await ask(engine, "a", context)

    context, second = run(go())
    assert second.cached_tokens == 0 and second.version_spans == [(1, 60)]
    check_generation(context, second)


@pytest.mark.parametrize("in_flight", ["continue", "drain"])
def test_shared_weights_need_no_loading(in_flight):
    """There is nothing to load, because the module has the new weights already."""
    engine = make_engine(in_flight)

    async def go():
        first = await ask(engine, "a")
        copy_weights(engine.model, weights_of(4))
        await engine.load_weights(None, 4)
        return first, await ask(engine, "b")

    for turn, version in zip(run(go()), (0, 4), strict=True):
        assert turn.version_spans == [(version, 60)]
        check_generation(PROMPT, turn)


def test_a_deterministic_engine_refuses_weights_during_a_turn():
    engine = LocalEngine(ToyLM(), None, 8, 300)

    async def go():
        turn = ask(engine, "a")
        await steps(5)
        with pytest.raises(AssertionError, match="between turns"):
            await engine.load_weights(weights_of(1), 1)
        return await turn

    assert run(go()).version_spans == [(0, 60)]


# -- drain ------------------------------------------------------------------------------------------------------------


def test_draining_ends_running_turns_and_delays_new_ones():
    engine = make_engine("drain")

    async def go():
        early = ask(engine, "early")
        await steps(5)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await steps(5)
        late = ask(engine, "late")
        await steps(10)
        assert not early.done() and not loading.done()
        await early
        await loading
        assert not late.done()
        return await early, await late

    early, late = run(go())
    assert (early.version_spans, late.version_spans) == ([(0, 60)], [(1, 60)])
    check_generation(PROMPT, early)
    check_generation(PROMPT, late)


def test_a_draining_engine_never_blocks(monkeypatch):
    """There is a release, an error, a close and a second load, each while a load waits for the end of a turn."""

    async def begin(engine):
        turn = ask(engine, "a", sampling=SamplingParams(max_generate_length=10**6))
        await steps(5)
        loading = asyncio.ensure_future(engine.load_weights(weights_of(1), 1))
        await steps(2)
        assert not loading.done()
        return turn, loading

    async def released(engine):
        turn, loading = await begin(engine)
        engine.release("a")
        await loading
        assert (await turn).finish == FinishReason.ABORT

    async def failed(engine):
        turn, loading = await begin(engine)
        monkeypatch.setattr(engine.runner, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await turn
        monkeypatch.undo()
        await loading

    async def closed(engine):
        turn, loading = await begin(engine)
        await engine.close()
        await loading
        assert (await turn).finish == FinishReason.ABORT

    async def loaded_twice(engine):
        _, loading = await begin(engine)
        second = asyncio.ensure_future(engine.load_weights(weights_of(2), 1))
        engine.release("a")
        await asyncio.gather(loading, second)

    async def given_up(engine):
        turn, loading = await begin(engine)
        loading.cancel()
        late = ask(engine, "b", sampling=SamplingParams(max_generate_length=3))
        assert (await late).version_spans == [(0, 3)] and not turn.done()
        engine.release("a")

    for ending, version in ((released, 1), (failed, 1), (closed, 1), (loaded_twice, 1), (given_up, 0)):
        engine = make_engine("drain")
        run(ending(engine))
        assert engine.version == version, ending.__name__
        again = run(engine.generate("new", PROMPT, SamplingParams(max_generate_length=4)))
        assert again.version_spans == [(version, 4)], ending.__name__


def test_a_drain_survives_the_end_of_an_event_loop():
    engine = make_engine("drain")

    async def leave():
        ask(engine, "a")
        await steps(5)

    run(leave())
    engine.release("a")
    run(engine.load_weights(weights_of(1), 1))
    assert run(engine.generate("b", PROMPT, LONG)).version_spans == [(1, 60)]


# -- any order of events ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["continue", "drain"])
def test_random_interleavings(in_flight):
    """In 20 random orders of turns, releases and new weights, every token is that of its version, and all turns end."""
    spans = 0
    for seed in range(20):
        rng = random.Random(seed)
        engine = make_engine(in_flight, slots=rng.choice([1, 2, 8]))
        for prompt, generation in run(at_random(engine, rng)):
            check_generation(prompt, generation)
            spans += len(generation.version_spans)
            if in_flight == "drain":
                assert len(generation.version_spans) <= 1
    assert in_flight == "drain" or spans > 140, "or no turn was interrupted"


async def at_random(engine, rng):
    turns, contexts, loads = {}, {}, []
    over = []
    for _ in range(rng.randint(5, 25)):
        await steps(rng.choice([0, 1, 2, 7]))
        event = rng.random()
        free = [name for name in range(5) if name not in turns or turns[name].done()]
        if event < 0.6 and free:
            name = rng.choice(free)
            if name in turns:
                over.append((contexts[name], turns[name].result()))
            contexts[name] = contexts.get(name, []) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
            if name in turns and rng.random() < 0.7:
                contexts[name] = [*over[-1][0], *over[-1][1].token_ids, rng.randrange(VOCABULARY)]
            sampling = SamplingParams(max_generate_length=rng.randint(1, 25), seed=rng.randrange(99))
            turns[name] = ask(engine, str(name), contexts[name][:200], sampling)
            contexts[name] = contexts[name][:200]
        elif event < 0.75 and turns:
            engine.release(str(rng.choice(list(turns))))
        else:
            version = len(loads) + 1
            loads.append(asyncio.ensure_future(engine.load_weights(weights_of(version), version)))
    await asyncio.gather(*loads)
    assert engine.version == len(loads)
    for name, turn in turns.items():  # an ended turn makes room for a waiting one
        turn.add_done_callback(lambda turn, name=str(name): engine.release(name))
    over += [(contexts[name], await turn) for name, turn in turns.items()]
    await engine.close()
    return over


# -- new weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_every_weight_is_updated(make_tiny_model, fuse):
    """The engine computes the same as the trained model, also through fused views."""
    trained = make_tiny_model(1)
    replica = make_tiny_model(0)
    engine = LocalEngine(replica, None, 8, 200, fuse, deterministic=False)
    state = trained.state_dict()
    run(engine.load_weights({name: value for name, value in state.items() if name != "lm_head.weight"}, 1))
    for name, value in replica.state_dict().items():
        assert torch.equal(value, state[name]), name
    turn = run(engine.generate("a", PROMPT, LONG))
    expected = full_logprobs(trained, turn.token_ids)
    torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=1e-4, rtol=0)


def test_incomplete_weights_are_refused_without_a_change():
    model = ToyLM()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name in weights_of(1):
        weights = weights_of(1)
        del weights[name]
        with pytest.raises(ValueError, match=f"do not fit ToyLM: no weights for {name}$"):
            copy_weights(model, weights)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_weights_with_other_names_or_shapes_are_refused():
    engine = make_engine()
    bad = {f"module.{name}": value for name, value in weights_of(1).items()}
    with pytest.raises(ValueError, match=r"no weights for embed.weight, .*no parameter has the name module.embed"):
        run(engine.load_weights(bad, 1))
    bad = weights_of(1) | {"positions.weight": torch.zeros(1, 16)}  # would be broadcast
    with pytest.raises(ValueError, match="another shape for positions.weight$"):
        run(engine.load_weights(bad, 1))
    assert engine.version == 0
    turn = run(engine.generate("a", PROMPT, LONG))
    assert turn.version_spans == [(0, 60)]
    check_generation(PROMPT, turn)


def test_tied_weights_load_by_either_name_in_any_precision():
    model = ToyLM()
    weights = {name: value.double() for name, value in weights_of(1).items()}
    weights["head.weight"] = weights.pop("embed.weight")
    copy_weights(model, weights)
    assert all(torch.equal(value, weights_of(1)[name]) for name, value in model.named_parameters())
    assert model.dtype == torch.float32


def test_a_custom_function_applies_weights():
    def shift_embedding(module, weights):
        with torch.no_grad():
            module.embed.weight.add_(weights["shift"])

    engine = make_engine(apply_weights=shift_embedding)
    run(engine.load_weights({"shift": torch.full((VOCABULARY, 1), 0.5)}, 3))
    turn = run(engine.generate("a", PROMPT, LONG))
    assert turn.version_spans == [(3, 60)]
    expected = ToyLM()
    shift_embedding(expected, {"shift": torch.full((VOCABULARY, 1), 0.5)})
    torch.testing.assert_close(torch.tensor(turn.logprobs), full_logprobs(expected, turn.token_ids), atol=1e-4, rtol=0)
    assert (logprobs_of(0, PROMPT, turn.token_ids) - torch.tensor(turn.logprobs)).abs().max() > 0.01


def test_a_turn_that_waits_while_weights_are_gathered_is_sampled_afterwards(tiny_model):
    """No other request wakes the engine."""
    is_gathering, is_waiting = threading.Event(), threading.Event()

    def gather(model, weights):
        is_gathering.set()
        assert is_waiting.wait(60)

    async def sample():
        engine = LocalEngine(tiny_model, None, deterministic=False, apply_weights=gather)
        loading = asyncio.ensure_future(engine.load_weights(GatheredWeights({}, dict.fromkeys, 1), 1))
        while not is_gathering.is_set():
            await asyncio.sleep(0.01)
        turn = asyncio.ensure_future(engine.generate("0", [1, 2, 3], SamplingParams(max_generate_length=2)))
        for _ in range(10):  # the engine finds nothing that it may do, and waits
            await asyncio.sleep(0)
        is_waiting.set()
        await loading
        generation = await turn
        await engine.close()
        return generation

    assert run(sample()).version_spans == [(1, 2)]
