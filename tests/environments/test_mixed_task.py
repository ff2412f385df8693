"""The task of a mixture: its rows, and the environment and the functions of the source of each row."""

import asyncio
import random

import pytest

from mtrl.config.schema import Config
from mtrl.datasets import Splits
from mtrl.environments.base import BaseEnvironment
from mtrl.environments.factory import load_task
from mtrl.environments.family import Recital
from mtrl.errors import UserError
from mtrl.play.episode import Rules, TextEpisode
from mtrl.rollout.demonstrations import demonstrate
from mtrl.scoring.heldout import score_groups
from mtrl.types import Group

THIS = __name__
CLOSED = []


def rows(split, count):
    return [
        {"id": f"{split}-{n}", "prompt": [{"role": "user", "content": "go"}], "ground_truth": {}} for n in range(count)
    ]


class Plain(BaseEnvironment):
    """An environment whose methods are not async. It rewards 1 for its own name."""

    @classmethod
    def load(cls, data, seed, count=2):
        return Splits(rows("train", count), rows("test", 2))

    def __init__(self, max_turns=5, count=2):
        super().__init__(max_turns)

    def step(self, response, ground_truth):
        return float(response == "plain"), None, True

    def close(self):
        CLOSED.append("plain")
        super().close()

    @staticmethod
    def score(trajectory, row):
        return 0.25

    @staticmethod
    def answered(trajectory, row):
        return True

    @staticmethod
    def demonstrate(row, rng):
        return Recital(["plain"])


class Later(Plain):
    """An async environment with tools, which receives messages. It has no `answered`."""

    answered = None

    async def reset(self, row=None):
        self.tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        return [{"role": "user", "content": f"look at {row['id']}"}]

    async def respond(self, message, response, ground_truth):
        return float(message["content"] == "later"), None, True

    async def close(self):
        CLOSED.append("later")

    @staticmethod
    def score(trajectory, row):
        return 0.75


def config(plain=1, later=1, count=2):
    config = Config()
    config.environments = {
        "plain": {"weight": plain, "environment": {"target": f"{THIS}.Plain", "config": {"count": count}}},
        "later": {"weight": later, "environment": {"target": f"{THIS}.Later", "config": {"count": 1}}},
    }
    return config


def test_rows_are_interleaved_and_named_by_their_source_and_a_source_of_weight_0_has_only_held_out_rows():
    splits = load_task(config()).splits
    assert [row["id"] for row in splits.train] == ["plain/train-0", "later/train-0", "plain/train-1"]
    assert [row["id"] for row in splits.held_out] == ["plain/test-0", "later/test-0", "plain/test-1", "later/test-1"]
    splits = load_task(config(later=0)).splits
    assert [row["id"] for row in splits.train] == ["plain/train-0", "plain/train-1"] and len(splits.test) == 4


def test_each_row_is_played_and_scored_by_its_source_and_its_environment_is_closed():
    run = config()
    task = load_task(run)
    rules = Rules.of(run, task.make_environment)
    CLOSED.clear()

    async def play(row, response):
        episode = TextEpisode(rules, row, "g")
        opening = await episode.open()
        await episode.say(response)
        await episode.close()
        group = Group("g", row, [episode.trajectory])
        await score_groups(task.family, [group], 10.0)
        return opening[0]["content"], episode.trajectory

    plain, later, *_ = task.splits.train
    shown, trajectory = asyncio.run(play(plain, "plain"))
    assert (shown, trajectory.reward, trajectory.score, trajectory.answered) == ("go", 1.0, 0.25, True)
    shown, trajectory = asyncio.run(play(later, "later"))
    assert (shown, trajectory.reward) == ("look at later/train-0", 1.0), trajectory.error
    assert (trajectory.score, trajectory.answered) == (0.75, None)
    assert CLOSED == ["plain", "later"]
    messages = demonstrate(task.family, task.make_environment, plain, random.Random(0)).messages
    assert messages[-1] == {"role": "assistant", "content": "plain"}


def test_an_error_of_a_source_names_it():
    run = config()
    run.environments["later"]["environment"]["config"] = {"size": 1}
    with pytest.raises(UserError, match=r"environments\.later: environment\.config"):
        load_task(run)
