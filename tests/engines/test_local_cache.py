"""Keys and values survive growth, shrinking and moves of the cache."""

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtrl.engines.base import SamplingParams
from mtrl.engines.local import half
from mtrl.engines.local.cache import SlotCache
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.graphs import GraphCache
from mtrl.engines.local.half import DenseCache

CACHES = [SlotCache, DenseCache]
ROWS = 6


def make(cache, dtype=torch.float32):
    return cache(2, 3, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize("cache", CACHES)
def test_the_bytes_of_a_row_are_those_of_its_memory(cache):
    cache = make(cache, torch.bfloat16)
    size = cache.row_bytes(100)
    cache.reserve(5, 100)
    assert size * 5 == sum(block.nbytes for store in (cache.keys, cache.values) for block in store)


def test_the_cache_of_an_engine_is_limited(tiny_model):
    """An engine holds as many trajectories as its memory has room for at their maximum length, and at least one."""
    row = LocalEngine(tiny_model, None, max_context_length=100).runner.cache.row_bytes(100)
    limits = {None: 8, 100 * row: 8, 3 * row + 1: 3, 0: 1}
    for limit, rows in limits.items():
        engine = LocalEngine(tiny_model, None, max_num_seqs=8, max_context_length=100, cache_bytes=limit)
        assert engine.max_num_seqs == rows


@pytest.mark.parametrize("cache", CACHES)
@given(data=st.data())
def test_rows_survive_growth_shrinking_and_moves(cache, data):
    cache, held = make(cache), [[] for _ in range(ROWS)]
    cache.reserve(ROWS, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(data.draw(st.integers(1, 8))):
        longest = max(map(len, held))
        match data.draw(st.sampled_from(["write", "reserve", "fit", "move"])):
            case "write":
                row, count = data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(1, 70))
                new = torch.randn(count, 2, 3, 4, generator=generator)  # tokens, keys and values, heads, numbers
                at = torch.arange(len(held[row]), len(held[row]) + count)[None]
                cache.reserve(ROWS, len(held[row]) + count)
                for layer in range(2):
                    cache.write(layer, torch.tensor([[row]]), at, new[None, :, 0] + layer, new[None, :, 1] + layer)
                held[row] = [*held[row], *new]
            case "reserve":
                cache.reserve(data.draw(st.integers(ROWS, 2 * ROWS)), data.draw(st.integers(1, 200)))
            case "fit":
                cache.fit(ROWS, longest + 1)
                assert cache.capacity == cache.rounded(longest + 1)
            case "move":
                moved = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
                targets = data.draw(st.permutations(range(ROWS)))[: len(moved)]
                cache.move(moved, targets, longest)
                before = list(held)
                for source, target in zip(moved, targets, strict=True):
                    held[target] = before[source]
    for layer in range(2):
        for row, tokens in enumerate(held):
            for i, store in enumerate((cache.keys, cache.values)):
                found = store[layer][row, :, : len(tokens)].transpose(0, 1)
                expected = torch.stack([token[i] for token in tokens]) + layer if tokens else found
                assert torch.equal(found, expected)


@pytest.mark.parametrize("cache", CACHES)
def test_rows_that_nothing_holds_do_not_grow(cache):
    """A long conversation at the end of a step takes the memory of its own row, and not of all rows."""
    cache = make(cache)
    cache.reserve(8, 100)
    cache.keys[0][:2] = 7.0
    cache.reserve(5, 200)
    assert cache.slots == 8, "more than half of the rows are held"
    for longer in (cache.reserve, cache.fit):
        longer(2, cache.capacity + 1)
        assert cache.slots == 2 and (cache.keys[0][:, :, :100] == 7.0).all()
    cache.reserve(3, 1)
    assert cache.slots == 3 and (cache.keys[0][:2, :, :100] == 7.0).all()


@given(tokens=st.integers(1, 5000))
def test_capacities_are_rounded_up(tokens):
    stepped, doubled, dense = (make(kind).rounded(tokens) for kind in (SlotCache, GraphCache, DenseCache))
    assert tokens <= dense < tokens + 32 and dense % 32 == 0
    assert tokens <= doubled < max(65, 2 * tokens) and doubled & (doubled - 1) == 0
    assert tokens <= stepped <= (max(64, 2 * tokens) if tokens <= 1024 else 1.25 * tokens) and stepped % 64 == 0


def test_a_cache_stores_in_its_own_precision():
    cache = make(SlotCache, torch.bfloat16)
    cache.reserve(1, 1)
    third = torch.full((1, 1, 3, 4), 1 / 3)
    cache.write(0, torch.tensor([[0]]), torch.tensor([[0]]), third, third)
    assert (cache.keys[0][0, :, 0] == torch.tensor(1 / 3).bfloat16()).all()


def test_the_cache_is_freed_with_the_last_trajectory(tiny_model):
    """The update that follows the rollouts needs the memory; later turns are sampled as before."""
    engine, sampling = LocalEngine(tiny_model, None, max_context_length=100), SamplingParams(max_generate_length=8)

    async def turn(name, others=()):
        tokens = (await engine.generate(name, [1, 2, 3], sampling)).token_ids
        held = sum(block.nbytes for block in engine.runner.cache.keys)
        for each in (name, *others):
            engine.release(each)
        return tokens, held, sum(block.nbytes for block in engine.runner.cache.keys)

    async def go():
        first = await turn("a")
        engine.deterministic = False
        engine.open("c")
        second = await turn("b")
        engine.release("c")
        await engine.close()
        return first, second

    (tokens, held, left), (again, _, kept) = asyncio.run(go())
    assert held > 0 == left and kept > 0
    assert len(tokens) == len(again) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_shrink_after_long_trajectories(dtype, make_tiny_model, sample_turns, monkeypatch):
    engine = LocalEngine(make_tiny_model().to(dtype), None, max_context_length=400)
    cache, sampling = engine.runner.cache, SamplingParams(max_generate_length=8)
    monkeypatch.setattr(cache, "clear", lambda: None)  # the end of the last trajectory frees the cache
    sample_turns(engine, [[1] * 300, [2] * 20], turns=1, sampling=sampling)
    assert cache.capacity >= 300
    sample_turns(engine, [[3] * 20, [2] * 21], turns=2, sampling=sampling)
    assert cache.capacity <= 64


def test_split_queries_give_the_same_attention(make_tiny_model, sample_turns, monkeypatch):
    """A row much longer than its tokens gives the result of a short one, up to the rounding of bfloat16."""
    model = make_tiny_model().bfloat16()

    def sampled():
        engine = LocalEngine(model, None, max_context_length=400)
        prompts = [[1, 2, 3] * 9, [4] * 30, [5, 6]]
        turns_of = sample_turns(
            engine, prompts, turns=2, sampling=SamplingParams(max_generate_length=6, temperature=0.0)
        )
        return [generation for turns in turns_of.values() for generation in turns]

    whole = sampled()
    with monkeypatch.context() as patch:
        patch.setattr(half, "SCORES", 200)
        parts = sampled()
    monkeypatch.setattr(DenseCache, "rounded", lambda self, capacity: 10 * capacity)
    for one, *others in zip(whole, parts, sampled(), strict=True):
        for other in others:
            assert other.token_ids == one.token_ids
            assert other.logprobs == pytest.approx(one.logprobs, abs=0.02)
