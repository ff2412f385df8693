"""Critics of small models, and their samples. Not a test; the tests of the critic import it."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_group, split_by_turn
from transformers import GPT2Config, GPT2LMHeadModel

from mtrl.config.schema import Config
from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.distributed.rank_group import RankGroup
from mtrl.distributed.world import World
from mtrl.trainer.data.samples import group_samples
from mtrl.trainer.flops import model_flops
from mtrl.trainer.update.critic import Critic
from mtrl.trainer.update.learner import Learners, layout_of
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.value_learner import ValueLearner, value_model
from mtrl.types import Group

METHODS = pytest.mark.parametrize("method", ["gae", "turn_gae"])


def config_of(method="gae", lr=3e-3, clip=None, trainer=None, **algorithm):
    config = Config(run_dir="unused")
    config.algorithm = replace(config.algorithm, advantage_method=method, **algorithm)
    config.algorithm.critic = replace(config.algorithm.critic, value_clip=clip, optimizer=OptimizerConfig(lr=lr))
    config.trainer = replace(config.trainer, **(trainer or {}))
    return config


def critic_of(model, config=None, dump=None, head=None):
    """Return a critic that starts from this model; `head` is the seed of a value head with random weights."""
    config = config or config_of()
    learner = ValueLearner(config, value_model(config, model))
    rank_group = RankGroup(World(), SimpleNamespace(critic=learner))
    critic = Critic(config, Learners(rank_group, model_flops(learner.model), layout_of(config, [learner.model])), dump)
    critic.learner = learner
    if head is not None:
        with torch.no_grad():
            critic.learner.model.head.weight.normal_(generator=torch.Generator().manual_seed(head))
            critic.learner.model.head.bias.fill_(0.25)
    return critic


def groups_of(vocabulary, count=3, split=False):
    groups = [make_group(seed, vocabulary) for seed in range(count)]
    if split:
        groups = [Group(g.group_id, g.row, [split_by_turn(t) for t in g.trajectories]) for g in groups]
    return groups


def samples_of(groups):
    return [s for g in groups for s in group_samples(g, [[0.0] * len(t.turns) for t in g.trajectories])]


def per_trajectory(samples, values):
    """Return one array per trajectory, over all of its samples."""
    joined = {}
    for sample, own in zip(samples, values, strict=True):
        joined.setdefault((sample.group_id, sample.trajectory), []).append(own)
    return {key: np.concatenate(parts) for key, parts in joined.items()}


def plain_values(critic, sample):
    """Return the values by a plain forward over one sample: the head applied to the hidden state before each sampled
    token."""
    with torch.no_grad():
        hidden = critic.learner.model.body(torch.tensor([sample.token_ids])).last_hidden_state[0]
        everywhere = (hidden @ critic.learner.model.head.weight[0] + critic.learner.model.head.bias).tolist()
    return [everywhere[place - 1] for place, sampled in enumerate(sample.loss_mask) if sampled]


def zeros(samples):
    return [np.zeros(s.action_tokens) for s in samples]


class Capture(Optimizer):
    """Optimiser that stores the gradients instead of applying them."""

    def step(self, step):
        self.grads = [p.grad.clone() for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return 0.0, 0.0


def gradients(critic, samples, old, targets):
    critic.learner.optimizer = Capture(critic.learner.model, critic.learner.settings.optimizer, 1)
    critic.update(samples, old, targets, 0)
    return critic.learner.optimizer.grads


def make_exact_model():
    """Return a model that computes in float64 throughout."""
    torch.set_num_threads(1)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval().double()
