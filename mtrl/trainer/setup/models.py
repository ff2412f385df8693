"""Creation of the models that are trained, with adapters, sharding and optimisers, from a configuration."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtrl.config.derived import max_logits
from mtrl.config.schema import Config
from mtrl.config.trainer_schema import TrainerConfig
from mtrl.distributed.meshes import ModelParallel
from mtrl.distributed.sharding import compile_layers, needs_sharding, shard, shard_from_leader
from mtrl.distributed.world import World
from mtrl.models.experts import routers_of
from mtrl.models.logprobs import PLAIN, compiled_kernels
from mtrl.models.lora import add_adapters, without_adapters
from mtrl.models.router_replay import RouterReplay
from mtrl.trainer.checkpoint.saver import BackgroundSaver, Saver
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.loading import (
    compute_dtype,
    fit_to_ranks,
    load_model,
    load_peer,
    pick_device,
    recompute,
    set_attention,
)
from mtrl.trainer.setup.placement import sent_device
from mtrl.trainer.setup.sequence_parallel import sequence_group
from mtrl.trainer.setup.teacher import teacher_model
from mtrl.trainer.update.learner import Learner
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy
from mtrl.trainer.update.value_learner import ValueLearner, value_model
from mtrl.utils.process import usable_cores

SMALL_MODEL = 5_000_000
"""Number of parameters up to which one CPU thread is faster than several, because of the barriers between threads."""


def make_learner(config: Config, world: World, path: str) -> Learner:
    """Create the models that are trained, from the folder or Hub name `path`, and their optimisers. Return this rank's
    share of them.

    Raises:
        UserError: a model of the configuration cannot be loaded, or settings do not fit together.
    """
    trainer, algorithm = config.trainer, config.algorithm
    set_threads(config, world)
    own_group = sequence_group(config, world)
    # A model that will be sharded is moved to the GPU layer by layer, since the whole model may not fit. Followers read
    # their slices from the files of the weights, or receive them from the leader, since a machine's memory may not hold
    # whole models for all its ranks.
    sharded = needs_sharding(trainer.fsdp, world)
    device = config.model.device if not sharded else "cpu" if world.is_leader else "meta"
    model, tokenizer = load_model(config, path, device=device, in_files=world.size > 1)
    if pick_device(config.model.device).type == "cpu":
        warn_of_offloads(trainer)
    if trainer.threads is None and sum(p.numel() for p in model.parameters()) <= SMALL_MODEL:
        torch.set_num_threads(1)
    recompute(model, config)
    if world.is_leader:
        fit_to_ranks(model, config)
        world.broadcast(model.config._attn_implementation)
    else:
        set_attention(model, world.broadcast(None))
    values, reference = value_model(config, model), reference_model(config, model)
    teacher = teacher_model(config, model, tokenizer)
    if config.model.lora_rank:
        model = add_adapters(model, config.model, config.seed)
    replay = RouterReplay(model) if algorithm.router_replay and routers_of(model) else None
    modules = model, reference, teacher, values
    model, reference, teacher, values = (prepared(module, config, world) for module in modules)
    as_policy = partial(
        Policy,
        tokenizer=tokenizer,
        temperature=config.generator.sampling_params.temperature,
        max_logits=max_logits(config, pick_device(config.model.device).type),
        kernels=compiled_kernels() if trainer.compile else PLAIN,
        sequence_group=own_group,
    )
    policy = as_policy(
        model,
        entropy_gradient=algorithm.entropy_coef != 0,
        sent_dtype=compute_dtype(config),
        sent_device=sent_device(config, pick_device(config.model.device)),
        router_replay=replay,
    )
    frozen = None
    if needs_reference(config):
        frozen = WithoutAdapters(policy) if reference is None else as_policy(reference)
    optimizer = Optimizer(model, trainer.optimizer, trainer.max_steps)
    critic = None if values is None else ValueLearner(config, values, own_group)
    saver = (BackgroundSaver if trainer.checkpoint.background else Saver)(world.background_group)
    return Learner(config, policy, frozen, optimizer, critic, saver, None if teacher is None else as_policy(teacher))


def warn_of_offloads(trainer: TrainerConfig) -> None:
    """Warn about settings that move memory of a GPU to the CPU, in a run on a CPU."""
    if trainer.optimizer.offload:
        warnings.warn("trainer.optimizer.offload=true has no effect on a CPU, where moments are anyway", stacklevel=1)
    if trainer.gradient_checkpointing and trainer.activation_offload:
        warnings.warn(
            "trainer.activation_offload=true has no effect on a CPU, where activations are anyway", stacklevel=1
        )


class WithoutAdapters:
    """The reference for training of adapters: the policy with its adapters disabled."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return log-probs like `Policy.all_logprobs`, without the adapters."""
        with without_adapters(self.policy.model):
            return self.policy.all_logprobs(batches)


def set_threads(config: Config, world: World) -> None:
    """Set the number of CPU threads: as configured, else 1 for the tiny policy, whose warm start must not depend on the
    machine, else this rank's share of the cores."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.size > 1 else 1
    default = 1 if config.model.name == "tiny" else max(1, usable_cores() // ranks_here)
    torch.set_num_threads(config.trainer.threads or default)


def prepared(module: Any, config: Config, world: World) -> Any:
    """Return the module prepared for training: compiled if configured, and sharded if the configuration or the number
    of ranks requires it; None for None."""
    if module is None:
        return None
    if config.trainer.compile:
        compile_layers(module)
    if not needs_sharding(config.trainer.fsdp, world):
        return module
    return (shard if world.size == 1 else shard_from_leader)(
        module,
        config.trainer.fsdp,
        world,
        pick_device(config.model.device),
        ModelParallel.of(config.trainer),
    )


def needs_reference(config: Config) -> bool:
    """Return whether the KL to a reference is used, in the loss or in the reward."""
    return bool(config.algorithm.kl_loss_coef or config.algorithm.kl_reward_coef)


def reference_model(config: Config, model: Any) -> Any:
    """Return a frozen reference for the KL; None if the KL is not used, or if the reference is the policy without its
    adapters.

    Raises:
        UserError: `algorithm.kl_reference` cannot be used.
    """
    path = config.algorithm.kl_reference
    if not needs_reference(config) or (config.model.lora_rank and not path):
        return None
    reference = load_peer(config, path, "algorithm.kl_reference", model) if path else copy.deepcopy(model)
    return reference.eval().requires_grad_(False)
