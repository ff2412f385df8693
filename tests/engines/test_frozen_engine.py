"""The engine of a frozen opponent: concurrent turns are sampled one after another, and none waits forever."""

import asyncio

from mtrl.engines.base import SamplingParams
from mtrl.engines.local.frozen import FrozenEngine

PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 7], "c": [1, 2, 3]}


def sampled(model, names):
    """Return the ids and log-probs of two turns of each trajectory, sampled at the same time."""
    engine = FrozenEngine(model, None, 100)

    async def turns(name):
        found, prompt = [], PROMPTS[name]
        for turn in range(2):
            params = SamplingParams(max_generate_length=5, seed=7 * ord(name) + turn)
            generation = await engine.generate(name, prompt, params)
            found.append((generation.token_ids, generation.logprobs))
            prompt = [*prompt, *generation.token_ids, 9]
        return found

    async def everything():
        found = await asyncio.wait_for(asyncio.gather(*map(turns, names)), 60)
        await engine.close()
        return dict(zip(names, found, strict=True))

    return asyncio.run(everything())


def test_concurrent_turns_are_those_of_trajectories_alone(make_tiny_model):
    model = make_tiny_model()
    together = sampled(model, list(PROMPTS))
    alone = {name: turns for each in PROMPTS for name, turns in sampled(model, [each]).items()}
    assert together == alone and together["a"] != together["c"]
    assert all(len(ids) == 5 for turns in together.values() for ids, _ in turns)
