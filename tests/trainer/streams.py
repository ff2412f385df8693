"""Streams over rollouts without episodes, for tests of the handling of groups."""

import asyncio
import random
import time
from dataclasses import replace

from helpers import make_group

from mtrl.config.schema import Config, RewardConfig
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.family import Family
from mtrl.rewards.compose import RewardComposer
from mtrl.rollout.rollouts import Rollouts
from mtrl.trainer.data.stream import Stream
from mtrl.types import Group


def family_of(score):
    """Return a family without an environment; only its scorer is called."""
    return Family("streams", environment=BaseEnvironment, load=Splits, score=score)


FAMILY = family_of(lambda trajectory, row: 1.0)


class FakeRollouts(Rollouts):
    """Rollouts without episodes: each group takes some time, and its tokens have the version of the weights at its
    end."""

    def __init__(self, seed=0, max_failed_share=1.0):
        super().__init__(None, seed, max_failed_share)
        self.version, self.running, self.most, self.names = 0, 0, 0, []
        self.rng = random.Random(seed)

    async def group(self, group_id, row, size, sampling):
        self.names.append(group_id)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            first = self.version
            await self.play(group_id, row)
            return self.make(group_id, row, size, first)
        finally:
            self.running -= 1

    async def play(self, group_id, row):
        await asyncio.sleep(0.002 * self.rng.paretovariate(1.0) % 0.05)

    def make(self, group_id, row, size, version):
        group = make_group(row["n"], 50, size)
        for trajectory in group.trajectories:
            trajectory.group_id = group_id
            for turn in trajectory.turns:
                turn.version_spans = [(self.version, len(turn.action_ids))]
                turn.reward = 0.0
            first = trajectory.turns[0]
            first.version_spans = [(version, 1), (self.version, len(first.action_ids) - 1)]
            trajectory.turns[-1].reward = float(trajectory.index % 2)
        return Group(group_id, row, group.trajectories)


class Gated(FakeRollouts):
    """Rollouts whose groups end when the test opens their gates."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.gates = {}

    async def play(self, group_id, row):
        await self.gates.setdefault(group_id, asyncio.Event()).wait()

    def open(self, *names):
        for name in names:
            self.gates.setdefault(name, asyncio.Event()).set()


class Rows:
    """Rows with the number n in the n-th row."""

    def __init__(self):
        self.drawn = 0

    def next(self):
        self.drawn += 1
        return {"id": str(self.drawn - 1), "n": self.drawn - 1, "prompt": [], "ground_truth": {}}


def make(kind=Stream, rollouts=None, batch=4, lag=1, rows=None, family=FAMILY, algorithm=None, **settings):
    config = Config(run_dir="unused")
    config.trainer.prompts_per_step = batch
    config.algorithm = replace(config.algorithm, group_size=2, **(algorithm or {}))
    config.async_config = replace(config.async_config, max_steps_off_policy=lag, **settings)
    rows = rows or Rows()
    rollouts = rollouts or FakeRollouts()
    return kind(config, rollouts, RewardComposer(RewardConfig()), family, None, rows.next)


def run(coroutine):
    """Run the coroutine with a time limit and return its result. No task may be left running. An environment whose
    episode was cancelled while it closed is closed by its thread, a moment later."""

    async def alone():
        result = await asyncio.wait_for(coroutine, 30)
        await soon(lambda: asyncio.all_tasks() == {asyncio.current_task()})
        return result

    return asyncio.run(alone())


async def train(stream, steps, start=0, update=0.002, close=True):
    """Return the experiences of these steps; the update is a pause."""
    found = []
    try:
        for step in range(start, start + steps):
            found.append(await stream.collect(step))
            await asyncio.sleep(update)
            publish(stream, step + 1)
    finally:
        if close:
            await stream.close()
    return found


def publish(stream, version):
    stream.trained()
    stream.rollouts.version = version
    stream.publish(version)


def ids(experiences):
    return [[group.group_id for group in experience.groups] for experience in experiences]


def rows_of(experiences):
    return [group.row["n"] for experience in experiences for group in experience.groups]


def all_closed(environments):
    """Return whether each environment is closed once within a time limit; one that was being created is closed later by
    a thread."""
    end = time.monotonic() + 20
    while not all(environment.closed for environment in environments) and time.monotonic() < end:
        time.sleep(0.01)
    return all(environment.closed == 1 for environment in environments)


async def soon(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)
