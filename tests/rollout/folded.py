"""Episodes whose context is folded, with the context of each turn as the engine received it. Not a test."""

import asyncio
from dataclasses import dataclass
from functools import partial

from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.folding import REQUEST
from mtrl.types import Trajectory

ROW = {"id": "r1", "prompt": [{"role": "user", "content": "Q"}], "ground_truth": {}}


class Talker(BaseEnvironment):
    """Answers every response with a longer text, and pays 1 for each turn."""

    def __init__(self, more=1, **config):
        super().__init__(**config)
        self.more = more

    def step(self, response, ground_truth):
        assert response.islower(), "the environment received a summary"
        return 1.0, f"heard {response}{', and some more words' * self.more}", False

    def truncate(self, ground_truth):
        return {"settled": 0.5}


class Recorder(ScriptedEngine):
    """Engine whose turns are the letters of a text, and whose summaries are S1, S2 and so on. It keeps the prompt, the
    sampled ids and the seed of every call."""

    def __init__(self, codec, letters):
        super().__init__(lambda *_: self.answer, codec.tokenizer)
        self.letters, self.request = letters, codec.render([REQUEST])
        self.calls, self.asked, self.answer = [], 0, ""

    async def generate(self, trajectory_id, prompt, sampling):
        is_asked = prompt[-len(self.request) :] == self.request
        self.asked += is_asked
        self.answer = f"S{self.asked}" if is_asked else self.letters[len(self.calls) - self.asked]
        generation = await super().generate(trajectory_id, prompt, sampling)
        self.calls.append((list(prompt), list(generation.token_ids), sampling.seed))
        return generation


@dataclass
class Played:
    trajectory: Trajectory
    calls: list
    """Prompt, sampled ids and seed of each call of the engine."""


def play(codec, fold, turns=3, index=0, max_context_length=2000, more=1):
    """Play one episode of at most this many turns; `more` is the length of the observations."""
    pool, engine = EnvironmentPool(1), Recorder(codec, ("abcdefgh", "ijklmnop")[index])
    limits = EpisodeLimits(turns, max_context_length, step_timeout=60, episode_timeout=300, retries=0)
    loop = EpisodeLoop(engine, partial(Talker, more), partial(Conversation, codec), pool, limits, fold=fold)
    sampling = SamplingParams(max_generate_length=40, stop_token_ids=codec.stop_token_ids)
    try:
        return Played(asyncio.run(loop.run(ROW, "g", index, sampling)), engine.calls)
    finally:
        pool.close()
