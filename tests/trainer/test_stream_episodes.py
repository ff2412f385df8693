"""The stream over real episodes: the local engine samples, environments take time, and weights change meanwhile."""

import asyncio
import random
from dataclasses import replace
from functools import partial

import pytest
from streams import all_closed, family_of, ids, publish, run, soon

from mtrl.config.schema import Config, RewardConfig
from mtrl.engines.base import SamplingParams
from mtrl.engines.local.engine import LocalEngine
from mtrl.engines.scripted import ScriptedEngine
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.pool import EnvironmentPool
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.conversation import Conversation
from mtrl.rollout.episode import EpisodeLimits, EpisodeLoop
from mtrl.rollout.rollouts import Rollouts
from mtrl.trainer.data.experience import Collector
from mtrl.trainer.data.stream import Stream
from mtrl.types import StopReason

FAMILY = family_of(lambda trajectory, row: float(len(trajectory.turns) > 1))


class Tracked:
    """Mixin of an engine that records the open trajectories."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.opened = set()

    def open(self, trajectory_id):
        super().open(trajectory_id)
        self.opened.add(trajectory_id)

    def release(self, trajectory_id):
        super().release(trajectory_id)
        self.opened.discard(trajectory_id)


class TrackedLocalEngine(Tracked, LocalEngine):
    pass


class TrackedScriptedEngine(Tracked, ScriptedEngine):
    pass


class Slow(BaseEnvironment):
    """Environment that answers after a while and counts the calls of `close`."""

    made: list = []  # noqa: RUF012

    def __init__(self, max_turns=3, **config):
        super().__init__(max_turns)
        self.closed, self.turns = 0, 0
        Slow.made.append(self)

    async def step(self, response, ground_truth):
        await asyncio.sleep(random.Random(f"{ground_truth}/{self.turns}").random() * 0.01)
        self.turns += 1
        return float(len(response) % 3), f"again {self.turns}", self.turns == 3

    def close(self):
        self.closed += 1


class Hanging(Slow):
    """Environment whose first steps never end."""

    async def step(self, response, ground_truth):
        if ground_truth["n"] < 2:
            await asyncio.Event().wait()
        return await super().step(response, ground_truth)


@pytest.fixture
def play(tiny_tokenizer, tiny_codec):
    """Function `play(kind, engine, lag, environment=Slow, **settings)` that makes a producer of this kind, with
    episodes of three turns."""
    pools, numbers = [], []

    def make(kind, engine, lag, environment=Slow, **settings):
        Slow.made = []
        pools.append(EnvironmentPool(4))
        loop = EpisodeLoop(
            engine, environment, partial(Conversation, tiny_codec), pools[-1], EpisodeLimits(3, 200, 30, 60, retries=0)
        )
        config = Config(run_dir="unused")
        config.trainer.prompts_per_step = 2
        config.algorithm = replace(config.algorithm, group_size=3)
        config.async_config = replace(config.async_config, max_steps_off_policy=lag, **settings)
        sampling = SamplingParams(max_generate_length=8, stop_token_ids=tiny_codec.stop_token_ids)
        numbers.append(iter(range(1000)))
        return kind(
            config, Rollouts(loop, 0, 0.0), RewardComposer(RewardConfig()), FAMILY, sampling, partial(row, numbers[-1])
        )

    yield make
    for pool in pools:
        pool.close()


def row(numbers):
    n = next(numbers)
    return {"id": str(n), "prompt": [{"role": "user", "content": f"how many {n}"}], "ground_truth": {"n": n}}


def actions_of(experiences):
    return [
        [(t.group_id, t.task_id, t.score, [turn.action_ids for turn in t.turns]) for t in group.trajectories]
        for experience in experiences
        for group in experience.groups
    ]


async def learn(producer, steps):
    """Return the experience of these steps; the weights stay the same under new versions."""
    engine, found = producer.rollouts.loop.engine, []
    for step in range(steps):
        found.append(await producer.collect(step))
        await engine.load_weights(None, step + 1)
        publish(producer, step + 1)
    await producer.close()
    await engine.close()
    assert not engine.opened
    return found


def test_without_staleness_the_groups_are_those_of_the_collector(tiny_model, play):
    """Names, rows and tokens are equal. Log-probs are compared approximately, since their last bits depend on the
    composition of a batch."""

    def found(kind):
        engine = TrackedLocalEngine(tiny_model, None, 8, 200, deterministic=False)
        return run(learn(play(kind, engine, lag=0), 3))

    stream, collector = found(Stream), found(Collector)
    assert actions_of(stream) == actions_of(collector)
    for ours, theirs in zip(stream, collector, strict=True):
        for group, other in zip(ours.groups, theirs.groups, strict=True):
            for t, u in zip(group.trajectories, other.trajectories, strict=True):
                for a, b in zip(t.turns, u.turns, strict=True):
                    assert a.action_logprobs == pytest.approx(b.action_logprobs, abs=1e-5)
                    assert (a.reward, a.version_spans) == (b.reward, b.version_spans)


@pytest.mark.parametrize("in_flight", ["continue", "drain"])
@pytest.mark.parametrize("on_stale", ["wait", "requeue"])
def test_weights_change_in_the_middle_and_no_token_is_too_old(tiny_model, play, in_flight, on_stale):
    engine = TrackedLocalEngine(tiny_model, None, 8, 200, deterministic=False, in_flight=in_flight)
    found = run(learn(play(Stream, engine, lag=2, on_stale=on_stale), 8))
    for step, experience in enumerate(found):
        for t in (t for group in experience.groups for t in group.trajectories):
            assert 0 <= step - t.oldest_version <= 2
            assert all(sum(n for _, n in turn.version_spans) == len(turn.action_ids) for turn in t.turns)
            assert t.stop_reason == StopReason.DONE and t.score == 1.0
    assert {v for e in found for g in e.groups for t in g.trajectories for turn in t.turns for v in turn.versions} > {0}
    assert all_closed(Slow.made)


def test_requeued_and_closed_episodes_are_cleaned_up(tiny_tokenizer, play):
    """Episodes are stopped during a step: each environment is closed once, sessions are released, and no task runs."""

    async def go():
        engine = TrackedScriptedEngine(lambda trajectory_id, turn: "ab", tiny_tokenizer)
        stream = play(Stream, engine, lag=1, environment=Hanging, on_stale="requeue")
        hung = []
        for step in range(3):
            found = await stream.collect(step)
            hung += [name for name in ids([found])[0] if "~" in name]
            await engine.load_weights(None, step + 1)
            publish(stream, step + 1)
        started = list(Slow.made)
        await soon(lambda: engine.opened >= {"step0/0~/0", "step0/1~/2"})  # the prompts are repeated
        assert not any(name.startswith(("step0/0/", "step0/1/")) for name in engine.opened)
        await stream.close()
        assert started and all_closed(Slow.made)
        assert not engine.opened and not hung

    run(go())
