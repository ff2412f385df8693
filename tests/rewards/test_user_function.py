"""Reward functions in all supported forms, including the class of the SageMaker article."""

import json
import math
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from mtrl.config.schema import RewardConfig
from mtrl.errors import UserError
from mtrl.rewards.compose import RewardComposer
from mtrl.types import FinishReason, Group, Trajectory, Turn

THIS = "test_user_function"
TRUTH = {"ready": "true", "response": "success"}


def composed(name, turns=3, response='{"ready": "TRUE", "response": "none"}', **parameters):
    """Return rewards and metrics of a trajectory whose last message is `response`."""
    observation = [{"role": "user", "content": "Q"}]
    message = {"role": "assistant", "content": response}
    sampled = ([1], [2], [-0.1], [(0, 1)], FinishReason.STOP)
    made = [Turn(*sampled, text=response, message=message, observation=observation) for _ in range(turns)]
    trajectory = Trajectory("task", "g7", 0, made)
    row = {"id": "task", "prompt": observation, "ground_truth": TRUTH}
    spec = {"weight": 1.0, "target": f"{THIS}.{name}", **parameters}
    RewardComposer(RewardConfig(components={"mine": spec})).apply(Group("g7", row, [trajectory]))
    return trajectory.rewards, trajectory.metrics


def last_assistant(history):
    return next(message["content"] for message in reversed(history) if message["role"] == "assistant")


class SOPBenchReward:
    """The class of the article, with another parser."""

    ground_truth: dict[str, str]
    format_coef: float = 0.1

    async def __call__(self, history):
        fields = json.loads(last_assistant(history))
        emitted = float(fields is not None)
        if fields is None:
            return self.format_coef * (emitted - 1), {"completion": 0.0, "field_acc": 0.0}
        matched = sum(
            1 for k, v in self.ground_truth.items() if str(fields.get(k)).strip().lower() == str(v).strip().lower()
        )
        field_acc = matched / len(self.ground_truth)
        reward = field_acc + self.format_coef * (emitted - 1)
        return reward, {"completion": emitted, "field_acc": field_acc}


DataclassReward = dataclass(type("DataclassReward", (SOPBenchReward,), {"__annotations__": {"ground_truth": dict}}))


@dataclass
class PerTurn:
    ground_truth: dict
    scale: float = 1.0

    def __call__(self, messages):
        return [self.scale * len(self.ground_truth)] * 3


async def of_messages(history):
    return len(history), {"seen": 1.0}


def per_turn(messages, row):
    return [0.25, 0, 1], {"seen": 3.0}


def as_array(messages, row):
    return np.array([0.25, 0.0, 1.0])


def of_truth(messages, ground_truth):
    return float(ground_truth == TRUTH)


def two_numbers(messages, row):
    return 0.5, 0.25


def takes_nothing():
    return 0.0


@pytest.mark.parametrize("name", ["SOPBenchReward", "DataclassReward"])
def test_the_articles_class_has_the_rows_ground_truth(name):
    assert composed(name) == ([0.0, 0.0, 0.5], {"completion": 1.0, "field_acc": 0.5})
    assert composed(name, response="null") == ([0.0, 0.0, -0.1], {"completion": 0.0, "field_acc": 0.0})


def test_a_class_takes_parameters_of_the_configuration():
    assert composed("PerTurn", scale=0.5)[0] == [1.0, 1.0, 1.0]


class Small(float):
    """A float whose `abs` is 0."""

    def __abs__(self):
        return 0.0


class Unprintable(float):
    def __repr__(self):
        raise ValueError("no text")


def with_metrics(messages, row, *, metrics):
    return 0.5, metrics


def with_reward(messages, row, *, reward):
    return reward


def exits(messages, row):
    os._exit(0)


async def exits_async(messages, row):
    os._exit(0)


METRICS = [np.int64(3), np.float32(3), torch.tensor(3.0), np.array(3), 3]
NO_METRICS = [
    {"m": math.nan}, {"m": 1e308}, {"m": 10**400}, {"m": Small(1e308)}, {"m": Unprintable(math.nan)}, {"m": None},
    {"m": "three"}, {"m": [1.0]}, {"m": np.zeros(2)}, {"m": torch.zeros(2)}, {3: 1.0}, {"m" * 300: 1.0},
]  # fmt: skip
NO_REWARDS = [
    math.nan, math.inf, 1e308, 10**400, 10**5000, Small(1e308), Small(math.nan), Unprintable(math.nan), "1", None, 1j,
    np.array(1e308), torch.tensor(math.nan),
]  # fmt: skip


@pytest.mark.parametrize("value", METRICS, ids=repr)
def test_metrics_become_plain_floats(value):
    _, metrics = composed("with_metrics", metrics={"words": value})
    assert metrics == {"words": 3.0} and type(metrics["words"]) is float


@pytest.mark.parametrize("metrics", NO_METRICS, ids=range(len(NO_METRICS)))
def test_metrics_that_are_not_finite_numbers_are_refused(metrics):
    with pytest.raises(UserError, match=r"components.mine returned metrics.*it must be .*trajectory 0 of group g7"):
        composed("with_metrics", metrics=metrics)


@pytest.mark.parametrize("reward", NO_REWARDS, ids=range(len(NO_REWARDS)))
def test_a_reward_that_is_no_finite_number_is_refused(reward):
    with pytest.raises(UserError, match=r"reward mine of trajectory 0 of group g7 .* must be a finite number below"):
        composed("with_reward", reward=reward)


@pytest.mark.parametrize("name", ["exits", "exits_async"])
def test_a_function_that_exits_raises_an_error(name):
    with pytest.raises(UserError, match=r"reward.components.mine failed: .*os._exit\(0\)"):
        composed(name)


def test_a_function_may_take_only_the_messages():
    assert composed("of_messages") == ([0.0, 0.0, 6.0], {"seen": 1.0})


def test_the_second_parameter_may_be_the_ground_truth():
    assert composed("of_truth")[0] == [0.0, 0.0, 1.0]


def test_a_reward_for_each_turn_with_metrics_and_without():
    assert composed("per_turn") == ([0.25, 0.0, 1.0], {"seen": 3.0})
    assert composed("as_array")[0] == [0.25, 0.0, 1.0]
    assert composed("two_numbers", turns=2)[0] == [0.5, 0.25]


def test_a_wrong_number_of_rewards_is_refused():
    with pytest.raises(UserError, match="mine gave 3 rewards for 2 turns .*; return one number, or one for each turn"):
        composed("per_turn", turns=2)


@pytest.mark.parametrize(
    ("name", "parameters"), [("takes_nothing", {}), ("per_turn", {"strict": 1}), ("PerTurn", {"strict": 1})]
)
def test_a_function_with_other_parameters_is_refused_before_the_first_episode(name, parameters):
    with pytest.raises(UserError, match="reward.components.mine does not fit its function, which takes"):
        composed(name, **parameters)
