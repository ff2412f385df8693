"""From a configuration to the models that are trained: given adapters, sharded, each with its optimiser."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtrl.config.schema import Config
from mtrl.distributed.sharding import compile_layers, needs_sharding, shard
from mtrl.distributed.world import World
from mtrl.models.checkpointing import checkpoint_gradients
from mtrl.models.lora import add_adapters, without_adapters
from mtrl.trainer.batching import MicroBatch
from mtrl.trainer.checkpoint_saver import BackgroundSaver, Saver
from mtrl.trainer.learner import Learner
from mtrl.trainer.loading import fit_attention, load_model, load_peer, pick_device
from mtrl.trainer.optimizer import Optimizer
from mtrl.trainer.policy import Policy
from mtrl.trainer.policy_learner import PolicyLearner
from mtrl.trainer.value_learner import ValueLearner, value_model

SMALL_MODEL = 5_000_000
"""Up to this many parameters one CPU thread beats several: the barriers between them cost more than they save."""


def make_learner(config: Config, world: World, path: str) -> Learner:
    """The models that are trained, from the folder or Hub name `path`, and their optimisers; this rank's share of them.

    Raises:
        UserError: what the configuration names cannot be had, or does not fit together.
    """
    trainer, algorithm = config.trainer, config.algorithm
    set_threads(config, world)
    # What is sharded moves to the GPU layer by layer: whole, it might not fit there.
    sharded = needs_sharding(trainer.fsdp, world)
    model, tokenizer = load_model(config, path, device="cpu" if sharded else config.model.device)
    if trainer.optimizer.offload and pick_device(config.model.device).type == "cpu":
        warnings.warn("trainer.optimizer.offload=true has no effect on a CPU, where moments are anyway", stacklevel=1)
    if trainer.threads is None and sum(p.numel() for p in model.parameters()) <= SMALL_MODEL:
        torch.set_num_threads(1)
    if trainer.gradient_checkpointing:
        checkpoint_gradients(model)
    fit_attention(model, config)
    values, reference = value_model(config, model), reference_model(config, model)
    if config.model.lora_rank:
        model = add_adapters(model, config.model, config.seed)
    model, reference, values = (prepared(module, config, world) for module in (model, reference, values))
    as_policy = partial(
        Policy,
        tokenizer=tokenizer,
        temperature=config.generator.sampling_params.temperature,
        max_logits=trainer.max_logits_per_chunk,
    )
    policy = as_policy(model, entropy_gradient=algorithm.entropy_coef != 0)
    frozen = None
    if needs_reference(config):
        frozen = WithoutAdapters(policy) if reference is None else as_policy(reference)
    learner = PolicyLearner(config, policy, frozen, Optimizer(model, trainer.optimizer, trainer.max_steps))
    saver = (BackgroundSaver if trainer.checkpoint.background else Saver)(world.background_group)
    return Learner(learner, None if values is None else ValueLearner(config, values), saver)


class WithoutAdapters:
    """The reference where adapters are trained: the policy, as it is without them."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """As `Policy.all_logprobs`."""
        with without_adapters(self.policy.model):
            return self.policy.all_logprobs(batches)


def set_threads(config: Config, world: World) -> None:
    """As the configuration says, or one for the tiny policy, whose warm start must not depend on the machine, or this
    rank's share of the cores."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.size > 1 else 1
    default = 1 if config.model.name == "tiny" else max(1, (os.cpu_count() or 1) // ranks_here)
    torch.set_num_threads(config.trainer.threads or default)


def prepared(module: Any, config: Config, world: World) -> Any:
    """A module as it is trained: compiled and sharded where the configuration or the number of ranks asks for it."""
    if module is None:
        return None
    if config.trainer.compile:
        compile_layers(module)
    if not needs_sharding(config.trainer.fsdp, world):
        return module
    return shard(module, config.trainer.fsdp, world, pick_device(config.model.device))


def needs_reference(config: Config) -> bool:
    """Whether the KL to a reference counts, in the loss or in the reward."""
    return bool(config.algorithm.kl_loss_coef or config.algorithm.kl_reward_coef)


def reference_model(config: Config, model: Any) -> Any:
    """A frozen reference for the KL; None where it counts nowhere, and where it is the policy without its adapters.

    Raises:
        UserError: `algorithm.kl_reference` cannot be used.
    """
    path = config.algorithm.kl_reference
    if not needs_reference(config) or (config.model.lora_rank and not path):
        return None
    reference = load_peer(config, path, "algorithm.kl_reference", model) if path else copy.deepcopy(model)
    return reference.eval().requires_grad_(False)
