"""Helpers for engines and episodes."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pytest

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.types import FinishReason, Generation


@pytest.fixture(scope="session")
def generation():
    """Function `generation(ids, cut=False)` that returns a sampled turn with distinct log-probs."""

    def make(ids, cut=False, version=0):
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        return Generation(list(ids), [-0.1 * (i + 1) for i in range(len(ids))], finish, [(version, len(ids))])

    return make


@pytest.fixture(scope="session")
def sample_turns():
    """Function that samples many trajectories of a `LocalEngine` at the same time and returns
    `{index: [Generation of each turn]}`.

    `prompts[i]` begins trajectory i, and fixed ids are the observation after each turn. `pause(i, turn)` is the delay
    of each request in seconds.
    """

    async def one(engine, i, prompt, turns, sampling, pause):
        generations, context = [], list(prompt)
        for turn in range(turns):
            if pause:
                await asyncio.sleep(pause(i, turn))
            generation = await engine.generate(str(i), context, replace(sampling, seed=1000 * i + turn))
            generations.append(generation)
            context = context + generation.token_ids + [5 + turn, 6 + i % 7]
        engine.release(str(i))
        return generations

    async def all_of_them(engine, prompts, turns, sampling, pause):
        for i in prompts:
            engine.open(str(i))
        out = await asyncio.gather(*(one(engine, i, p, turns, sampling, pause) for i, p in prompts.items()))
        await engine.close()
        return dict(zip(prompts, out, strict=True))

    def run(engine, prompts, turns=3, sampling=None, pause=None):
        sampling = sampling or SamplingParams(max_generate_length=6)
        prompts = prompts if isinstance(prompts, dict) else dict(enumerate(prompts))
        return asyncio.run(asyncio.wait_for(all_of_them(engine, prompts, turns, sampling, pause), 60))

    return run


@pytest.fixture(scope="session")
def contexts():
    """Function `contexts(prompts, sampled)` that returns `(context before the turn, Generation)` of every turn that
    `sample_turns` returned."""

    def unroll(prompts, sampled):
        for i, prompt in enumerate(prompts):
            context = list(prompt)
            for turn, generation in enumerate(sampled[i]):
                yield context, generation
                context = context + generation.token_ids + [5 + turn, 6 + i % 7]

    return unroll


class Counting(BaseEnvironment):
    """Base of the environments in these tests: it records every instance and how often each was closed."""

    made: ClassVar[list] = []

    def __init__(self, max_turns=5, **config):
        super().__init__(max_turns)
        self.closed = 0
        self.received = []
        Counting.made.append(self)

    def step(self, response, ground_truth):
        self.received.append(response)
        return 0.5, f"heard {response}", False

    def close(self):
        self.closed += 1


@pytest.fixture
def counting():
    """The class `Counting`, without recorded instances."""
    Counting.made = []
    return Counting


@pytest.fixture
def make_loop(tiny_tokenizer, tiny_codec):
    """Function `make_loop(environment, respond, layout=Conversation, **limits)` that returns an episode loop with fixed
    responses: a list for all trajectories, or a function of trajectory id and turn.
    """
    pools = []

    def make(environment, respond=("a", "b", "c", "d", "e", "f"), layout=Conversation, engine=None, **limits):
        standard = {"max_turns": 3, "max_context_length": 200, "step_timeout": 5, "episode_timeout": 20, "retries": 0}
        if not callable(respond):
            responses = respond

            def respond(trajectory_id, turn):
                return responses[turn]

        pools.append(EnvironmentPool(4))
        engine = engine or ScriptedEngine(respond, tiny_tokenizer)
        return EpisodeLoop(
            engine, environment, partial(layout, tiny_codec), pools[-1], EpisodeLimits(**{**standard, **limits})
        )

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def sampling(tiny_codec):
    return SamplingParams(max_generate_length=40, stop_token_ids=tiny_codec.stop_token_ids)


@pytest.fixture
def row():
    return {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "x"}}


@pytest.fixture
def run_episode(sampling, row):
    """Function `run_episode(loop)` that returns the trajectory of one episode."""

    def run_episode(loop, row=row, sampling=sampling):
        return asyncio.run(asyncio.wait_for(loop.run(row, "g", 0, sampling), 60))

    return run_episode
