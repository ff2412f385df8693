"""The canary detects servers that sample with other weights than the trainer's, and the publisher sends the weights
again. The engine is the local one, so that its tokens and the trainer's log-probs are real; only `probe` is added here.
"""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
import torch
from alone import learners_of

from mtrl.config.schema import Config
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.trainer.canary import MAX_DRAWS, TOKENS, Canary, WrongWeightsError
from mtrl.trainer.publisher import Publisher
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.work_thread import WorkThread

PROMPT = [5, 6, 7, 8]


class ProbedEngine(LocalEngine):
    """Engine with two servers that share one local engine; it records the loaded versions."""

    def __init__(self, *settings, **more):
        super().__init__(*settings, **more)
        self.loaded, self.asleep = [], False

    async def load_weights(self, weights, version):
        self.loaded.append(version)
        await super().load_weights(weights, version)

    async def probe(self, prompt, sampling):
        found = []
        for number in range(2):
            found.append(await self.generate(f"probe/{number}", prompt, sampling))
            self.release(f"probe/{number}")
        return found

    async def sleep(self):
        self.asleep = True

    async def wake(self):
        self.asleep = False


@pytest.fixture
def parts(make_tiny_model, tiny_tokenizer):
    """An engine with a copy of the trainer's weights, learners, and a canary."""
    model, replica = make_tiny_model(), make_tiny_model()
    engine = ProbedEngine(replica, tiny_tokenizer, max_context_length=200, deterministic=False)
    learners = learners_of(Config(run_dir="unused"), Policy(model, tiny_tokenizer, temperature=0.7))
    sampling = SamplingParams(temperature=0.7)
    return engine, learners, Canary(engine, learners.logprobs, WorkThread(False), PROMPT, sampling, 1e-3, "vllm")


def changed(model, by):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(by)


def test_the_same_weights_give_the_same_logprobs(parts):
    engine, _, canary = parts
    found = asyncio.run(canary.check(0))
    assert 0 <= found["engine/canary/mean"] <= found["engine/canary/max"] < 1e-4
    assert 2 * TOKENS <= engine.stats.sampled_tokens < 2 * TOKENS * MAX_DRAWS


@pytest.mark.parametrize("by", [1.5, float("nan")])
def test_different_weights_are_detected(parts, by):
    _, learners, canary = parts
    changed(learners.rank_group.worker.policy.model, by)
    with pytest.raises(
        WrongWeightsError, match=r"differ from the trainer's by .*generator.vllm.canary_tolerance=0.001"
    ):
        asyncio.run(canary.check(0))


def test_a_different_version_is_detected(parts):
    engine, _, canary = parts
    engine.version = 3
    with pytest.raises(WrongWeightsError, match="a server samples by version 3 instead of 4"):
        asyncio.run(canary.check(4))


def test_weights_are_sent_again_once(parts):
    engine, learners, canary = parts
    publisher = Publisher(engine, learners, WorkThread(False), sends_weights=True, canary=canary)
    changed(learners.rank_group.worker.policy.model, 1.5)
    assert asyncio.run(publisher.publish(1))["engine/canary/max"] < 1e-4
    assert engine.loaded == [1]

    apply, engine.apply_weights = engine.apply_weights, lambda *weights: setattr(engine, "apply_weights", apply)
    changed(learners.rank_group.worker.policy.model, 1.5)
    assert asyncio.run(publisher.publish(2))["engine/canary/max"] < 1e-4  # the weights were lost once and sent again
    assert engine.loaded == [1, 2, 2]

    engine.apply_weights = lambda *weights: None
    changed(learners.rank_group.worker.policy.model, 1.5)
    with pytest.raises(WrongWeightsError, match="version 3 differ"):
        asyncio.run(publisher.publish(3))
    assert engine.loaded == [1, 2, 2, 3, 3]


def test_a_run_begins_with_its_weights_in_every_engine(parts):
    engine, learners, canary = parts
    make = partial(Publisher, engine, learners, WorkThread(False), sends_weights=True, canary=canary)
    asyncio.run(make().begin(0))
    assert engine.loaded == []  # the engine was started with these weights, and the canary checks them
    changed(engine.model, 1.5)
    with pytest.raises(WrongWeightsError):
        asyncio.run(make().begin(0))
    asyncio.run(make(external=True).begin(0))
    asyncio.run(make().begin(3))
    assert engine.loaded == [0, 3]


def test_colocated_servers_sleep_during_the_update(parts, monkeypatch):
    engine, learners, _ = parts
    seen, freed = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(engine.asleep))

    async def step(publisher):
        async with publisher.asleep():
            seen.append(engine.asleep)
        seen.append(engine.asleep)

    make = partial(Publisher, engine, learners, WorkThread(False), sends_weights=True)
    asyncio.run(step(make()))
    asyncio.run(step(make(colocated=engine)))
    assert seen == [False, False, True, False]
    assert freed == [True], "what the update needed is given back before they wake, or they find no room"


def test_the_mean_over_many_tokens_decides_and_not_the_largest(parts):
    """One token with a large difference, as bfloat16 shows, ends no run; the same difference of every token does."""
    _, learners, canary = parts
    canary.tolerance = 0.1

    def shifted(amounts):
        def logprobs(batches):
            return [found + amounts(len(found)) for found in learners.logprobs(batches)]

        canary.logprobs = logprobs
        return asyncio.run(canary.check(0))

    found = shifted(lambda count: torch.where(torch.arange(count) == 0, 0.3, 0.0))
    assert 0.29 < found["engine/canary/max"] < 0.31 and found["engine/canary/mean"] < 0.1
    with pytest.raises(WrongWeightsError, match="on average"):
        shifted(lambda count: torch.full((count,), 0.3))


def test_a_repeated_check_samples_other_tokens(parts):
    engine, _, canary = parts
    seen, probe = [], engine.probe

    async def recorded(prompt, sampling):
        seen.append(sampling.seed)
        return await probe(prompt, sampling)

    engine.probe = recorded
    asyncio.run(canary.check(0))
    asyncio.run(canary.check(0))
    assert len(set(seen)) == len(seen) >= 2


def test_short_turns_are_drawn_again_until_there_are_enough_tokens(parts):
    engine, _, canary = parts
    probe = engine.probe

    async def short(prompt, sampling):
        return await probe(prompt, replace(sampling, max_generate_length=10))

    engine.probe = short
    asyncio.run(canary.check(0))
    assert TOKENS * 2 <= engine.stats.sampled_tokens <= 2 * 10 * MAX_DRAWS
