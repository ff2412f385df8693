"""Helpers that run episodes of agent programs through a gateway, with scripted responses."""

import asyncio
from contextlib import contextmanager
from functools import partial
from threading import Thread

from mtrl.agents.loop import AgentLoop
from mtrl.engines.base import SamplingParams
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.pool import EnvironmentPool
from mtrl.environments.tool_calls import format_call
from mtrl.gateway.server import Gateway
from mtrl.gateway.session import SessionLimits
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop

CALLS = 8
LIMITS = EpisodeLimits(max_turns=CALLS, max_context_length=4000, step_timeout=30, episode_timeout=60, retries=0)


class RecordingEngine(ScriptedEngine):
    """An engine with scripted responses that stores the ids of each prompt and of its answer in `sampled`."""

    def __init__(self, responses, codec):
        super().__init__(lambda name, turn: responses[turn], codec.tokenizer)
        self.sampled = []

    async def generate(self, trajectory_id, prompt, sampling):
        generation = await super().generate(trajectory_id, prompt, sampling)
        self.sampled.append((list(prompt), list(generation.token_ids)))
        return generation


def by_agent(runner, row, responses, codec, calls=CALLS, context=LIMITS.max_context_length):
    """Return the trajectory of an episode whose program `runner` starts; the policy gives `responses` in order. The
    trajectory has every token that the engine sampled, behind the context of which it was sampled.

    Args:
        calls: maximum number of calls.
        context: maximum number of tokens of a context with its answer.
    """
    engine = RecordingEngine(responses, codec)
    gateway = Gateway(engine, codec, SessionLimits(calls, 4, context))
    loop = AgentLoop(gateway, runner, LIMITS, max_concurrent=2)
    trajectory = asyncio.run(run(loop, row, codec))
    assert contexts(trajectory) == engine.sampled
    return trajectory


def by_environment(family, row, responses, codec, **settings):
    """Return the trajectory of the same episode in the environment of the family."""
    pool = EnvironmentPool(2)
    make = partial(family.environment, **settings)
    loop = EpisodeLoop(engine_of(responses, codec), make, partial(Conversation, codec), pool, LIMITS)
    return asyncio.run(run(loop, row, codec))


def engine_of(responses, codec):
    return ScriptedEngine(lambda name, turn: responses[turn], codec.tokenizer)


async def run(loop, row, codec):
    sampling = SamplingParams(max_generate_length=200, stop_token_ids=codec.stop_token_ids)
    try:
        return await loop.run(row, "g", 0, sampling)
    finally:
        await loop.close()


def calculator_call(expression):
    """Return the text of a call of the calculator."""
    return format_call("calculate", {"expression": expression})


def tokens(trajectory):
    """Return the ids of observations and actions, the break reason and the parent of each turn."""
    return [(turn.observation_ids, turn.action_ids, turn.break_reason, turn.parent) for turn in trajectory.turns]


def contexts(trajectory):
    """Return the ids of the whole context and of the action of each turn, as `RecordingEngine.sampled` has them."""
    found = []
    for index, turn in enumerate(trajectory.turns):
        before = turn.before(index)
        extended = [] if before is None else [*found[before][0], *found[before][1]]
        found.append((extended + turn.observation_ids, turn.action_ids))
    return found


@contextmanager
def served(app):
    """Serve an ASGI application on a thread, and yield its address."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
