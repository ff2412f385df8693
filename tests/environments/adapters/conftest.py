"""Fixtures that run environments of other frameworks in the episode loop, with fixed responses."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import pytest

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.family import get_family
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop

EXAMPLES = Path(__file__).parents[3] / "examples" / "environments"
ROW = {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {"answer": "42"}, "answer": "42"}


@pytest.fixture
def row():
    return {**ROW}


@pytest.fixture
def play(tiny_tokenizer, tiny_codec):
    """Function `play(cls, responses, row, max_turns=…, **config)` that returns the trajectory of an episode."""
    pools = []

    def play(environment, responses, row=ROW, max_turns=5, step_timeout=5, max_context_length=6000, **config):
        pools.append(EnvironmentPool(2))
        loop = EpisodeLoop(
            ScriptedEngine(lambda trajectory_id, turn: responses[turn], tiny_tokenizer),
            partial(environment, max_turns=max_turns, **config),
            partial(Conversation, tiny_codec),
            pools[-1],
            EpisodeLimits(max_turns, max_context_length, step_timeout=step_timeout, episode_timeout=30, retries=0),
        )
        sampling = SamplingParams(max_generate_length=400, stop_token_ids=tiny_codec.stop_token_ids)
        return asyncio.run(asyncio.wait_for(loop.run(row, "g", 0, sampling), 60))

    yield play
    for pool in pools:
        pool.close()


@pytest.fixture
def example(monkeypatch):
    """Function `example("module.Name")` that returns the family of a file of examples/environments."""
    monkeypatch.syspath_prepend(EXAMPLES)
    names = []

    def example(target):
        names.append(target.partition(".")[0])
        return get_family("x", target)

    yield example
    for name in names:
        sys.modules.pop(name, None)
