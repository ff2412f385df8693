"""Sessions over engines that tests control."""

import asyncio
import json

from mtrl.engines.base import EngineStats, SamplingParams
from mtrl.gateway.dialects.chat import read_chat, wire_message
from mtrl.gateway.dialects.completions import read_completion
from mtrl.gateway.session import Session, SessionLimits
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.types import FinishReason, Generation, Trajectory

USER = {"role": "user", "content": "question"}


class WatchedEngine:
    """Samples the token ids of `answer(number)`, records its requests, and refuses two requests at the same time."""

    def __init__(self, answer):
        self.answer, self.version, self.stats = answer, 3, EngineStats()
        self.open_ids, self.asking, self.released = [], [], []
        self.seen = {}
        """`(engine id, prompt, sampling, Generation)` of each request, by seed."""
        self.gate = asyncio.Event()
        self.gate.set()

    def open(self, trajectory_id):
        assert trajectory_id not in self.open_ids
        self.open_ids.append(trajectory_id)

    def release(self, trajectory_id):
        self.open_ids.remove(trajectory_id)
        self.released.append(trajectory_id)

    async def generate(self, trajectory_id, prompt, sampling):
        assert trajectory_id in self.open_ids and trajectory_id not in self.asking
        self.asking.append(trajectory_id)
        number = len(self.seen)
        self.seen[sampling.seed] = [trajectory_id, list(prompt), sampling, None]
        try:
            await self.gate.wait()
        finally:
            self.asking.remove(trajectory_id)
        answer = self.answer(number)
        if isinstance(answer, Exception):
            raise answer
        ids, finish = answer if isinstance(answer, tuple) else (answer, FinishReason.STOP)
        spans = [(self.version, len(ids))] if ids else []
        self.seen[sampling.seed][3] = Generation(ids, [-0.01 * (number + 1)] * len(ids), finish, spans)
        return self.seen[sampling.seed][3]


async def until_all_wait():
    """Return when all tasks of the event loop have had time to come to a wait that is not for a clock."""
    for _ in range(100):
        await asyncio.sleep(0)


def replies(codec, *texts):
    """Return the `answer` of an engine that gives these texts one after the other, each with the stop token."""
    return lambda number: [*codec.encode(texts[number % len(texts)]), codec.stop_token_ids[0]]


def session_of(engine, codec, calls=100, at_once=8, context=2000, **sampling):
    limits = SessionLimits(calls, at_once, context)
    sampling = {"max_generate_length": 50, "stop_token_ids": codec.stop_token_ids, **sampling}
    return Session("g/0", engine, codec, SamplingParams(**sampling), limits, "token")


def chat(*messages, **fields):
    """Return a request as the gateway receives it, converted to JSON and back."""
    return read_chat(json.loads(json.dumps({"messages": messages, **fields})))


def text(prompt, **fields):
    return read_completion({"prompt": prompt, **fields})


def wire(call):
    """Return an answer as a client receives it and sends it back, converted to JSON and back."""
    return json.loads(json.dumps(wire_message(call.message)))


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def trajectory_of(session):
    return Trajectory("t", "g", 0, session.turns())


def trained_contexts(turns):
    """Return the token ids before the action of each turn in the samples that are trained."""
    contexts = {}
    for sample in trajectory_samples(Trajectory("t", "g", 0, turns), [1.0] * len(turns)):
        contexts |= {index: sample.token_ids[: sample.turns.index(index)] for index in sample.turns if index >= 0}
    return [contexts[index] for index in range(len(turns))]
