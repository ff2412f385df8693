"""A learner's state: saved at one step, and continued bit for bit."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from critics import METHODS, config_of, groups_of, samples_of

from mtrl.errors import UserError
from mtrl.trainer.checkpoint.saver import BackgroundSaver
from mtrl.trainer.checkpoint.tensors import read_tensors
from mtrl.trainer.update.critic import Critic
from mtrl.trainer.update.learner import Learner, alone
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.update import Updater
from mtrl.trainer.update.value_learner import ValueLearner, value_model


def learner_of(model, config, with_critic=True):
    critic = ValueLearner(config, value_model(config, model)) if with_critic else None
    optimizer = Optimizer(model, replace(config.trainer.optimizer, lr=3e-3), 9)
    return Learner(config, Policy(model, None), None, optimizer, critic, BackgroundSaver())


def train(learner, config, samples, steps, dump=None):
    learners = alone(learner)
    critic, updater = Critic(config, learners, dump), Updater(config, learners, dump)
    for step in steps:
        targets = [np.full(s.action_tokens, math.sin(step + i)) for i, s in enumerate(samples)]
        critic.update(samples, critic.values(samples), targets, step)
        updater.run(
            [replace(s, advantages=[math.cos(step + i)] * len(s.token_ids)) for i, s in enumerate(samples)], step
        )


def tensors(learner):
    return {name: value.clone() for name, value in learner.state().items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@METHODS
def test_a_resumed_learner_continues_bit_for_bit(make_tiny_model, method, tmp_path):
    config = config_of(method, clip=0.2)
    model = make_tiny_model(2)
    samples = samples_of(groups_of(model.config.vocab_size))
    straight, stopped = (learner_of(make_tiny_model(2), config) for _ in range(2))
    train(straight, config, samples, range(4))
    train(stopped, config, samples, range(2))
    then = tensors(stopped)
    (tmp_path / "saved").mkdir()
    stopped.save(tmp_path / "saved")
    train(stopped, config, samples, range(2, 5))  # while the checkpoint is written
    stopped.saver.wait()
    resumed = learner_of(make_tiny_model(5), config)
    resumed.load(tmp_path / "saved")
    assert_equal(tensors(resumed), then)
    train(resumed, config, samples, range(2, 4))
    assert any("critic.optimizer" in name and "exp_avg_sq" in name for name in then)
    assert_equal(tensors(resumed), tensors(straight))


def test_a_checkpoint_from_before_the_first_step(make_tiny_model, tmp_path):
    config = config_of()
    (tmp_path / "saved").mkdir()
    fresh, other = learner_of(make_tiny_model(1), config), learner_of(make_tiny_model(2), config)
    fresh.save(tmp_path / "saved")
    fresh.saver.wait()
    other.load(tmp_path / "saved")
    assert_equal(tensors(other), tensors(fresh))


def test_a_checkpoint_holds_frozen_weights(make_tiny_model, tmp_path):
    """Some architectures have frozen weights without adapters, and an evaluation of the checkpoint needs them."""
    model = make_tiny_model(1)
    next(model.parameters()).requires_grad_(False)
    learner = learner_of(model, config_of(), with_critic=False)
    (tmp_path / "saved").mkdir()
    learner.save(tmp_path / "saved")
    learner.saver.wait()
    found = read_tensors(tmp_path / "saved", "model")
    assert_equal(found, learner.policy.state())


def test_a_checkpoint_without_a_critic_is_an_error(make_tiny_model, tmp_path):
    config = config_of()
    (tmp_path / "saved").mkdir()
    plain = learner_of(make_tiny_model(1), config, with_critic=False)
    plain.save(tmp_path / "saved")
    plain.saver.wait()
    with pytest.raises(UserError, match="has no critic, and algorithm.advantage_method needs one; resume with the"):
        learner_of(make_tiny_model(1), config).load(tmp_path / "saved")


def test_weights_for_a_copy_are_made_in_small_buckets_on_one_rank(make_tiny_model, monkeypatch):
    learner, asked = learner_of(make_tiny_model(2), config_of("rloo"), with_critic=False), []
    copied = Policy.weights
    monkeypatch.setattr(Policy, "weights", lambda self, names: asked.append(names) or copied(self, names))
    monkeypatch.setattr("mtrl.trainer.update.learner.COPY_BUCKET", 1)
    weights = alone(learner).weights()
    assert_equal(dict(weights), dict(copied(learner.policy)))
    assert asked == [[name] for name in weights], "a tensor that is larger than a bucket is a bucket of its own"
