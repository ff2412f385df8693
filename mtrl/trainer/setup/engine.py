"""Selection of the engine for a run, and of the location of its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mtrl.config.derived import is_deterministic, overlaps, serves
from mtrl.config.schema import Config
from mtrl.distributed.sharding import needs_sharding
from mtrl.distributed.world import World
from mtrl.engines.base import Engine
from mtrl.engines.local.engine import LocalEngine, copy_weights
from mtrl.engines.local.process import ProcessEngine
from mtrl.models.lora import LoraWeights
from mtrl.record.run_dir import RunDir
from mtrl.trainer.setup.loading import compute_dtype, load_model
from mtrl.trainer.setup.servers import server_engine
from mtrl.trainer.update.policy import Policy


def shared_engine(config: Config, model: Any, tokenizer: Any, context: int) -> Engine:
    """Return an embedded engine that shares the model's weights.

    Args:
        context: maximum length of a whole conversation, in tokens.
    """
    generator = config.generator
    fused, deterministic = generator.local.fused, is_deterministic(config)
    return LocalEngine(model, tokenizer, generator.max_num_seqs, context, fused, deterministic)


def training_engine(config: Config, world: World, path: str, policy: Policy, context: int) -> Engine:
    """Return the engine that samples for a policy: with the policy's own weights, or with a copy that gets new weights
    after each update.

    Args:
        path: folder or Hub name of the policy at the start of the run.
        context: maximum length of a whole conversation, in tokens.
    """
    if serves(config):
        logs = RunDir(config.run_dir).engine
        return server_engine(config, world, path, policy.model.config, context, logs)
    if not has_copy(config, world):
        return shared_engine(config, policy.model, policy.tokenizer, context)
    model, _ = load_model(config, path)
    model = model.to(compute_dtype(config))  # turns are sampled in the dtype in which the trainer computes
    generator = config.generator
    # Beside the trainer, the engine gets half as many threads, but at least one, since rollouts mostly wait.
    make = partial(ProcessEngine, threads=max(1, torch.get_num_threads() // 2))
    return (make if in_a_process(config) else LocalEngine)(
        model,
        policy.tokenizer,
        generator.max_num_seqs,
        context,
        generator.local.fused,
        is_deterministic(config),
        in_flight=config.async_config.in_flight,
        apply_weights=LoraWeights.of(policy.model) if config.model.lora_rank else copy_weights,
    )


def has_copy(config: Config, world: World) -> bool:
    """Return whether the engine has its own copy of the weights: with servers, with a sharded policy, with adapters,
    which the engine does not support, with an engine in a separate process, and if turns are sampled during
    updates."""
    sharded = needs_sharding(config.trainer.fsdp, world)
    return serves(config) or sharded or overlaps(config) or in_a_process(config) or config.model.lora_rank > 0


def in_a_process(config: Config) -> bool:
    """Return whether the local engine runs in a separate process."""
    local = config.generator.local
    return overlaps(config) if local.process is None else local.process
