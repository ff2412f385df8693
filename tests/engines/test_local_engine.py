"""Scheduling in the local engine: the batch never determines the tokens, and no turn waits forever."""

import asyncio
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.cache import SlotCache
from mtrl.engines.local.engine import LocalEngine
from mtrl.types import FinishReason

GENERATOR = random.Random(0)
PROMPTS = [[GENERATOR.randrange(300) for _ in range(GENERATOR.choice([2, 5, 5, 30]))] for _ in range(9)]
PROMPTS += [PROMPTS[0]] * 3
"""Prompts of all trajectories. The last ones are a group, with the same prompt."""


@pytest.fixture(scope="module")
def tokens_of():
    return lambda sampled: {i: [g.token_ids for g in generations] for i, generations in sampled.items()}


@pytest.fixture(scope="module")
def reference(tiny_model, sample_turns, tokens_of):
    """The turns of every trajectory, each sampled alone in an engine of its own."""
    sampled = {}
    for i, prompt in enumerate(PROMPTS):
        engine = LocalEngine(tiny_model, None, max_context_length=200, fused_decode=False)
        sampled |= sample_turns(engine, {i: prompt})
    return tokens_of(sampled)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def sample_each(engine, prompt, params):
    """Sample one turn per item of `params` at the same time, each in a trajectory of its own."""

    async def one(i, sampling):
        generation = await engine.generate(str(i), prompt, sampling)
        engine.release(str(i))
        return generation

    async def all_of_them():
        for i in range(len(params)):
            engine.open(str(i))
        return await asyncio.gather(*(one(i, sampling) for i, sampling in enumerate(params)))

    return run(all_of_them())


def irregular(seed):
    """Return pauses that depend on the turn and on `seed`."""
    draw = random.Random(seed)
    times = {(i, turn): draw.choice([0, 0, 0.001, 0.004]) for i in range(len(PROMPTS)) for turn in range(9)}
    return lambda i, turn: times[i, turn]


# -- tokens depend on the trajectory alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 5, 64])
def test_tokens_do_not_depend_on_the_batch(tiny_model, sample_turns, tokens_of, reference, fuse, deterministic, slots):
    engine = LocalEngine(tiny_model, None, slots, 200, fuse, deterministic)
    assert tokens_of(sample_turns(engine, PROMPTS)) == reference


@pytest.mark.parametrize("deterministic", [True, False])
def test_tokens_do_not_depend_on_delays(tiny_model, sample_turns, tokens_of, reference, deterministic):
    engine = LocalEngine(tiny_model, None, 5, 200, deterministic=deterministic)
    assert tokens_of(sample_turns(engine, PROMPTS, pause=irregular(1))) == reference


@pytest.mark.parametrize("slots", [4, 64])
def test_deterministic_logprobs_have_the_same_bits_under_any_delays(tiny_model, sample_turns, slots):
    def logprobs(seed):
        engine = LocalEngine(tiny_model, None, slots, 200, deterministic=True)
        sampled = sample_turns(engine, PROMPTS, turns=4, pause=irregular(seed) if seed else None)
        return {i: [g.logprobs for g in generations] for i, generations in sampled.items()}

    expected = logprobs(0)
    for seed in range(1, 5):
        assert logprobs(seed) == expected


def test_other_seeds_sample_other_tokens(tiny_model):
    engine = LocalEngine(tiny_model, None, max_context_length=200)
    drawn = sample_each(engine, PROMPTS[0], [SamplingParams(max_generate_length=8, seed=seed) for seed in range(20)])
    assert len({tuple(g.token_ids) for g in drawn}) > 15


def test_the_engine_samples_the_models_distribution(tiny_model):
    """The test compares two tokens of 3000 trajectories with the probabilities of the model."""
    engine, prompt = LocalEngine(tiny_model, None, 3000, 200), PROMPTS[0]
    params = [SamplingParams(max_generate_length=2, temperature=0.7, seed=seed) for seed in range(3000)]
    drawn = [g.token_ids for g in sample_each(engine, prompt, params)]
    first = Counter(ids[0] for ids in drawn)
    assert_follows(first, probabilities(tiny_model, prompt, 0.7))
    likeliest, _ = first.most_common(1)[0]
    second = Counter(ids[1] for ids in drawn if ids[0] == likeliest)
    assert_follows(second, probabilities(tiny_model, [*prompt, likeliest], 0.7))


def probabilities(model, context, temperature):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([context])).logits[0, -1].double()
    return torch.softmax(logits / temperature, -1).numpy()


def assert_follows(counts, probabilities):
    """Assert by chi-square that samples follow the probabilities; tokens expected less than five times count as one."""
    total = sum(counts.values())
    frequent = np.flatnonzero(probabilities * total >= 5)
    assert len(frequent) >= 3
    observed = np.array([*(counts[i] for i in frequent), 0])
    expected = np.array([*probabilities[frequent] * total, 0])
    observed[-1], expected[-1] = total - observed.sum(), total - expected.sum()
    stored = expected >= 1
    statistic = ((observed - expected)[stored] ** 2 / expected[stored]).sum()
    freedom = stored.sum() - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4


# -- the cache --------------------------------------------------------------------------------------------------------


def test_later_turns_prefill_only_new_tokens(tiny_model, sample_turns, contexts):
    prompts = PROMPTS[:4]
    sampled = sample_turns(LocalEngine(tiny_model, None, max_context_length=200), prompts, turns=3)
    for generations in sampled.values():
        assert generations[0].cached_tokens == 0
    before = {}
    for context, generation in contexts(prompts, sampled):
        held = before.get(tuple(context[:2]), 0)
        # The last sampled token was never fed, and the observation is new.
        assert generation.cached_tokens == (len(held) - 1 if held else 0)
        before[tuple(context[:2])] = context + generation.token_ids


def test_the_prompt_of_a_group_is_prefilled_once(tiny_model, sample_turns):
    engine = LocalEngine(tiny_model, None, max_context_length=200)
    sampled = sample_turns(engine, [PROMPTS[0]] * 5, turns=1)
    assert sorted(g.cached_tokens for (g,) in sampled.values()) == [0, *[len(PROMPTS[0]) - 1] * 4]
    assert engine.stats.prompt_tokens == 5 * len(PROMPTS[0])
    assert engine.stats.sampled_tokens == sum(len(g.token_ids) for (g,) in sampled.values())


def test_the_end_of_a_turn_moves_at_most_two_rows(tiny_model, monkeypatch):
    engine = LocalEngine(tiny_model, None, 64, 200)
    moved = []
    move = engine.runner.cache.move

    def count(sources, targets, length):
        moved.append(len(sources))
        move(sources, targets, length)

    monkeypatch.setattr(engine.runner.cache, "move", count)
    lengths = random.Random(3).sample(range(2, 42), 40)
    sample_each(engine, PROMPTS[0], [SamplingParams(max_generate_length=length) for length in lengths])
    shared, *later = moved
    assert shared == 39 and len(later) > 30 and max(later) <= 2


def test_an_edited_context_is_prefilled_from_the_edit(tiny_model):
    engine = LocalEngine(tiny_model, None, max_context_length=200)
    sampling = SamplingParams(max_generate_length=4)

    async def go():
        await engine.generate("a", [1, 2, 3, 4, 5], sampling)
        edited = await engine.generate("a", [1, 2, 9, 4, 5, 6], sampling)
        shorter = await engine.generate("a", [1, 2], sampling)
        return edited, shorter, await LocalEngine(tiny_model, None).generate("a", [1, 2, 9, 4, 5, 6], sampling)

    edited, shorter, fresh = run(go())
    assert (edited.cached_tokens, shorter.cached_tokens) == (2, 1)
    assert edited.token_ids == fresh.token_ids and edited.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_no_cached_token_survives_new_weights(make_tiny_model):
    model = make_tiny_model()
    engine = LocalEngine(model, None, max_context_length=200)
    sampling = SamplingParams(max_generate_length=6)

    async def go():
        first = await engine.generate("a", PROMPTS[0], sampling)
        context = PROMPTS[0] + first.token_ids + [7]
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), make_tiny_model(1).parameters(), strict=True):
                parameter.copy_(other)
        await engine.load_weights(model, 5)
        second = await engine.generate("a", context, sampling)
        return first, second, await LocalEngine(make_tiny_model(1), None).generate("a", context, sampling)

    first, second, fresh = run(go())
    assert (first.version_spans, second.version_spans, engine.version) == ([(0, 6)], [(5, 6)], 5)
    assert second.cached_tokens == 0
    assert second.token_ids == fresh.token_ids and second.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


# -- ends of a turn ---------------------------------------------------------------------------------------------------


class Chain:
    """A runner that samples `after[token]` after each token."""

    def __init__(self, tokenizer, text, start="q"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        chain = [tokenizer.encode(start)[0], *ids]
        assert len(set(chain)) == len(chain), "a token cannot have two successors"
        self.after = dict(pairwise(chain))
        self.size = len(tokenizer)
        self.cache = SlotCache(1, 1, 1, torch.float32, torch.device("cpu"))
        self.calls = 0

    def forward(self, ids, starts, lengths, first_slot, width):
        self.calls += 1
        last = ids[torch.arange(len(ids)), lengths - 1]
        logits = torch.zeros(len(ids), self.size)
        for row, token in enumerate(last.tolist()):
            logits[row, self.after.get(token, 0)] = 50.0
        return logits

    def refresh(self): ...


@pytest.fixture
def respond(tiny_model, tiny_tokenizer):
    """Function `respond(text, **sampling)` that returns the turn of a model that samples `text` after `q`."""

    def respond(text, max_context_length=200, prompt="q", **sampling):
        engine = LocalEngine(tiny_model, tiny_tokenizer, max_context_length=max_context_length)
        engine.runner = Chain(tiny_tokenizer, text)
        prompt_ids = tiny_tokenizer.encode(prompt)
        generation = run(engine.generate("a", prompt_ids, SamplingParams(**sampling)))
        return tiny_tokenizer.decode(generation.token_ids), generation

    return respond


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (("cd",), "abcd"),  # in one token or in several
        (("b", "cd"), "ab"),
        (("</x>",), "abcd</x>"),
        (("</sql>",), "abcd</x>é1</sql>"),  # a token of its own
        (("é",), "abcd</x>é"),  # two tokens
        (("x>é1",), "abcd</x>é1"),
    ],
)
def test_turns_end_at_stop_strings(respond, stop, message):
    text, generation = respond("abcd</x>é1</sql>2", stop=stop, max_generate_length=40)
    assert text == message and generation.finish == FinishReason.STOP


def test_a_stop_string_of_the_prompt_does_not_count(respond):
    text, generation = respond("cd", prompt="abq", stop=("bqc", "ab"), max_generate_length=2)
    assert text == "cd" and generation.finish == FinishReason.LENGTH


def test_stop_strings_are_detected_across_batches(tiny_model, tiny_tokenizer):
    """The end of a text is then spread over several batches."""
    engine = LocalEngine(tiny_model, tiny_tokenizer, max_context_length=200)
    engine.runner = Chain(tiny_tokenizer, "abcdefghijkl</x>mn")
    params = [SamplingParams(max_generate_length=n, stop=("l</x>",)) for n in (3, 13, 14, 40)]
    out = [
        (tiny_tokenizer.decode(g.token_ids), g.finish) for g in sample_each(engine, tiny_tokenizer.encode("q"), params)
    ]
    assert out == [
        ("abc", "length"),
        ("abcdefghijkl<", "length"),
        ("abcdefghijkl</", "length"),
        ("abcdefghijkl</x>", "stop"),
    ]


def test_turns_end_at_stop_ids(respond, tiny_tokenizer):
    end, other = tiny_tokenizer.eos_token_id, tiny_tokenizer.encode("d")[0]
    text, generation = respond("abc<|end|>d", stop_token_ids=(end,))
    assert text == "abc<|end|>" and generation.finish == FinishReason.STOP
    assert generation.token_ids[-1] == end and len(generation.logprobs) == 4
    assert respond("abc<|end|>d", stop_token_ids=(other, 5))[0] == "abc<|end|>d"


def test_turns_end_at_max_generate_length(respond):
    for length in (1, 2, 5):
        text, generation = respond("abcdefgh", max_generate_length=length)
        assert text == "abcdefgh"[:length] and generation.finish == FinishReason.LENGTH
    assert respond("ab<|end|>", max_generate_length=3, stop_token_ids=(0,))[1].finish == FinishReason.STOP


def test_turns_end_at_the_context_limit(respond):
    text, generation = respond("abcdefgh", max_context_length=6, prompt="xyq")
    assert text == "abc" and generation.finish == FinishReason.LENGTH
    text, generation = respond("abcdefgh", max_context_length=3, prompt="xyq")
    assert (generation.token_ids, generation.finish, generation.version_spans) == ([], FinishReason.LENGTH, [])


def test_turns_of_a_batch_end_independently(tiny_model, tiny_tokenizer):
    engine = LocalEngine(tiny_model, tiny_tokenizer, max_context_length=200)
    engine.runner = Chain(tiny_tokenizer, "abcdefgh")

    def token(letter):
        return tiny_tokenizer.encode(letter)[0]

    params = [
        SamplingParams(max_generate_length=2),
        SamplingParams(stop=("de",)),
        SamplingParams(stop_token_ids=(token("c"),)),
        SamplingParams(stop_token_ids=(token("x"), token("y"), token("g"))),
        SamplingParams(max_generate_length=4, temperature=0.0),
    ]
    texts = [tiny_tokenizer.decode(g.token_ids) for g in sample_each(engine, [token("q")], params)]
    assert texts == ["ab", "abcde", "abc", "abcdefg", "abcd"]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_release_aborts_a_decoding_turn(tiny_model, deterministic):
    engine = LocalEngine(tiny_model, None, 8, 200, deterministic=deterministic)

    async def go():
        engine.open("a")
        engine.open("b")
        long = SamplingParams(max_generate_length=180)
        aborted = asyncio.ensure_future(engine.generate("a", PROMPTS[0], long))
        other = asyncio.ensure_future(engine.generate("b", PROMPTS[1], long))
        for _ in range(20):
            await asyncio.sleep(0)
        engine.release("a")
        return await aborted, await other

    aborted, other = run(go())
    assert aborted.finish == FinishReason.ABORT and 10 < len(aborted.token_ids) < 30
    assert len(aborted.token_ids) == len(aborted.logprobs) == sum(count for _, count in aborted.version_spans)
    alone = run(
        LocalEngine(tiny_model, None, 8, 200).generate("b", PROMPTS[1], SamplingParams(max_generate_length=180))
    )
    assert other.token_ids == alone.token_ids[: len(other.token_ids)] and len(other.token_ids) > 100


def test_released_trajectories_are_not_decoded(tiny_model, tiny_tokenizer):
    engine = LocalEngine(tiny_model, tiny_tokenizer, max_context_length=200)
    engine.runner = Chain(tiny_tokenizer, "ab")

    async def go():
        waiting = asyncio.ensure_future(engine.generate("a", [5], SamplingParams(max_generate_length=150)))
        for _ in range(10):
            await asyncio.sleep(0)
        engine.release("a")
        await waiting
        calls = engine.runner.calls
        for _ in range(20):
            await asyncio.sleep(0)
        return calls, engine.runner.calls

    before, after = run(go())
    assert 1 < before < 20 and after == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_release_frees_a_slot(tiny_model, deterministic):
    """With one slot, the next trajectory gets it, also if it has the same name, as a retry has."""
    engine = LocalEngine(tiny_model, None, 1, 200, deterministic=deterministic)
    sampling = SamplingParams(max_generate_length=4)

    async def go():
        out = []
        for _ in range(3):
            engine.open("a")
            out.append((await engine.generate("a", PROMPTS[0], sampling)).token_ids)
            engine.release("a")
        engine.open("b")
        return [*out, (await engine.generate("b", PROMPTS[0], sampling)).token_ids]

    first, *others = run(go())
    assert others == [first] * 3
    assert engine.runner.cache.slots == 1


def test_release_unblocks_deterministic_batches(tiny_model):
    """Deterministic batches wait for all trajectories; one that sends no more requests must not block them."""
    engine = LocalEngine(tiny_model, None, 8, 200)

    async def go():
        for name in "abc":
            engine.open(name)
        waiting = [
            asyncio.ensure_future(engine.generate(n, PROMPTS[0], SamplingParams(max_generate_length=3))) for n in "ab"
        ]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(w.done() for w in waiting)
        engine.release("c")
        return await asyncio.gather(*waiting)

    assert [len(g.token_ids) for g in run(go())] == [3, 3]


def test_an_error_reaches_all_callers_and_the_engine_continues(tiny_model, monkeypatch):
    engine = LocalEngine(tiny_model, None, 2, 200)
    forward = engine.runner.forward
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return forward(*args)

    monkeypatch.setattr(engine.runner, "forward", fail)
    sampling = SamplingParams(max_generate_length=9)

    async def go():
        for i in range(4):  # two decode, two wait for a slot
            engine.open(str(i))
        errors = await asyncio.gather(
            *(engine.generate(str(i), PROMPTS[i], sampling) for i in range(4)), return_exceptions=True
        )
        again = await asyncio.gather(
            *(engine.generate(str(i), PROMPTS[i], sampling) for i in range(2)), wait_for_others()
        )
        return errors, again[:2]

    async def wait_for_others():
        engine.release("2")
        engine.release("3")

    errors, again = run(go())
    assert [str(e) for e in errors] == ["out of memory"] * 4
    fresh = LocalEngine(tiny_model, None, 2, 200)
    for i, generation in enumerate(again):
        assert generation.token_ids == run(fresh.generate(str(i), PROMPTS[i], sampling)).token_ids
        fresh.release(str(i))


def test_close_aborts_decoding_and_waiting_turns(tiny_model):
    engine = LocalEngine(tiny_model, None, 1, 200)

    async def go():
        for name in "ab":
            engine.open(name)
        waiting = [
            asyncio.ensure_future(engine.generate(n, PROMPTS[0], SamplingParams(max_generate_length=150))) for n in "ab"
        ]
        for _ in range(9):
            await asyncio.sleep(0)
        await engine.close()
        return await asyncio.gather(*waiting)

    assert [g.finish for g in run(go())] == [FinishReason.ABORT] * 2


def test_a_cancelled_request_ends_with_its_release(tiny_model):
    """An episode that runs out of time is cancelled while it waits for its turn."""
    engine = LocalEngine(tiny_model, None, 1, 200)
    sampling = SamplingParams(max_generate_length=150)

    async def go():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate("a", PROMPTS[0], sampling), 0.005)
        engine.release("a")
        return await engine.generate("b", PROMPTS[0], SamplingParams(max_generate_length=3))

    assert len(run(go()).token_ids) == 3


def test_the_engine_works_on_consecutive_event_loops(tiny_model, sample_turns, tokens_of):
    engine = LocalEngine(tiny_model, None, max_context_length=200)
    assert tokens_of(sample_turns(engine, PROMPTS[:3])) == tokens_of(sample_turns(engine, PROMPTS[:3]))
