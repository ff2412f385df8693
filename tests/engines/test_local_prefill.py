"""Prefill of the local engine: equal prompts, and equal beginnings of prompts, are computed once."""

import asyncio
import random
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.batch import EngineSession, SampleRequest
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.local.prefill import common_length, passes, plan_prefill

GENERATOR = random.Random(0)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40).map(sorted),
    budget=st.integers(1, 500),
    padding=st.integers(0, 100),
)
def test_prefill_passes_limit_padding(lengths, budget, padding):
    def fits(chunk):
        cells = len(chunk) * max(chunk)
        return len(chunk) == 1 or (cells <= budget and cells - sum(chunk) <= padding)

    sessions = [
        EngineSession(str(i), i, request=SampleRequest([0] * length, None, None)) for i, length in enumerate(lengths)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrl.engines.local.prefill.PREFILL_TOKENS", budget)
        chunks = [[len(s.request.context) for s in chunk] for chunk in passes(sessions, padding)]
    assert [*chain(*chunks)] == lengths
    assert all(map(fits, chunks))
    assert not any(fits([*chunk, later[0]]) for chunk, later in pairwise(chunks))


@pytest.mark.parametrize("fused", [True, False])
def test_prompts_with_the_same_instructions_feed_them_once(tiny_model, fused, monkeypatch):
    instructions = [GENERATOR.randrange(300) for _ in range(80)]
    prompts = [[*instructions, i, 2 * i] for i in range(5)] + [[*instructions, 0, 0]] + [[7, 8, 9]]
    sampling = SamplingParams(max_generate_length=6, seed=3)

    async def sample(engine, chosen):
        for i in chosen:
            engine.open(str(i))
        return await asyncio.gather(*(engine.generate(str(i), prompts[i], sampling) for i in chosen))

    together = LocalEngine(tiny_model, None, max_context_length=200, fused_decode=fused)
    fed = count_fed(together, monkeypatch)
    shared = asyncio.run(sample(together, range(7)))
    assert sum(fed) < 80 + 64 + sum(map(len, prompts)) - 6 * 80
    assert together.stats.cached_tokens == sum(generation.cached_tokens for generation in shared) == 4 * 80 + 81
    for i, generation in enumerate(shared):
        (alone,) = asyncio.run(sample(LocalEngine(tiny_model, None, max_context_length=200, fused_decode=fused), [i]))
        assert generation.token_ids == alone.token_ids
        assert generation.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def count_fed(engine, monkeypatch):
    """Return a list that receives the number of tokens, padding included, of each forward pass over several
    positions."""
    fed, forward = [], engine.runner.forward

    def counted(ids, *others):
        if ids.shape[1] > 1:
            fed.append(ids.numel())
        return forward(ids, *others)

    monkeypatch.setattr(engine.runner, "forward", counted)
    return fed


@settings(deadline=None)
@given(
    contexts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12),
    cached=st.data(),
    pass_cost=st.integers(1, 6),
)
def test_a_plan_feeds_each_context_once_and_shares_only_equal_beginnings(contexts, cached, pass_cost):
    sessions = []
    for i, context in enumerate(contexts):
        held = cached.draw(st.integers(0, len(context) - 1)) if cached.draw(st.booleans()) else 0
        sessions.append(EngineSession(str(i), i, ids=context[:held], request=SampleRequest(context, None, None)))
    plan = plan_prefill(sessions, pass_cost)
    assert sorted(s.order for s in plan.sessions) == [*range(len(contexts))]
    assert all(not s.ids and s.request.context == source.request.context for s, source in plan.copies)
    shared = [session for prefix in plan.prefixes for session in prefix.sessions]
    assert len(set(shared)) == len(shared) and set(shared) <= set(plan.fed)
    for prefix in plan.prefixes:
        beginnings = {tuple(s.request.context[: prefix.length]) for s in prefix.sessions}
        assert len(prefix.sessions) > 1 and len(beginnings) == 1 and prefix.length >= pass_cost
        assert all(not s.ids and len(s.request.context) > prefix.length for s in prefix.sessions)
    again = plan_prefill(sorted(sessions, key=lambda s: -s.order), pass_cost)
    assert again == plan


def test_prefixes_of_two_tasks_are_shared_apart():
    contexts = [[task] * 100 + [i] for task in (1, 2) for i in range(3)] + [[1] * 20 + [2] * 20]
    plan = plan_prefill(
        [EngineSession(str(i), i, request=SampleRequest(c, None, None)) for i, c in enumerate(contexts)], 16
    )
    assert [([s.order for s in p.sessions], p.length) for p in plan.prefixes] == [([0, 1, 2], 100), ([3, 4, 5], 100)]
    assert common_length([1, 2, 3], [1, 2, 3, 4]) == 2
