"""Selection of the engine for a run, and of the location of its weights."""

from __future__ import annotations

from typing import Any

import torch

from mtrl.config.derived import (
    in_a_process,
    is_deterministic,
    local_replicas,
    overlaps,
    sequences,
    serves,
)
from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.engines.base import Engine
from mtrl.engines.local.engine import LocalEngine, copy_weights
from mtrl.engines.local.memory import EngineMemory
from mtrl.engines.local.process import ProcessEngine
from mtrl.engines.local.replicas import ReplicatedEngine
from mtrl.engines.local.vision import VisionEngine
from mtrl.engines.local.weight_storages import own_storages
from mtrl.engines.server.engine import ServerEngine
from mtrl.models.lora import LoraWeights
from mtrl.models.vision import has_vision
from mtrl.record.run_dir import RunDir
from mtrl.rollout.served_workers import ServedWorkers
from mtrl.trainer.loading import cast_parameters, compute_dtype, load_model, pick_device
from mtrl.trainer.setup.placement import bytes_to_come, cache_bytes, has_copy
from mtrl.trainer.setup.servers import server_engine, server_settings
from mtrl.trainer.setup.workers import start_served_workers, start_workers
from mtrl.trainer.update.policy import Policy


def shared_engine(
    config: Config, model: Any, tokenizer: Any, context: int, reserved: int = 0, record_experts: bool = False
) -> Engine:
    """Return an embedded engine that shares the model's weights.

    Args:
        context: maximum length of a whole conversation, in tokens.
        reserved: bytes on the model's GPU that the trainer will allocate.
        record_experts: see `LocalEngine`.
    """
    local = config.generator.local
    return (VisionEngine if has_vision(model.config) else LocalEngine)(
        model,
        tokenizer,
        sequences(config),
        context,
        local.fused,
        is_deterministic(config),
        cache_bytes=cache_bytes(model.device, reserved),
        cuda_graphs=local.cuda_graphs,
        record_experts=record_experts,
    )


def training_engine(config: Config, world: World, path: str, policy: Policy, context: int) -> Engine:
    """Return the engine that samples for a policy: with the policy's own weights, or with a copy that gets new weights
    after each update.

    Args:
        path: folder or Hub name of the policy at the start of the run.
        context: maximum length of a whole conversation, in tokens.
    """
    if serves(config):
        logs = RunDir(config.run_dir).engine
        servers = server_engine(config, world, path, policy.model.config, context, logs)
        return start_served_workers(config, path, servers) if config.rollouts.workers else servers
    if config.rollouts.workers:
        return start_workers(config, path, policy)
    if not has_copy(config, world):
        reserved, records = bytes_to_come(policy.model), config.algorithm.router_replay
        return shared_engine(config, policy.model, policy.tokenizer, context, reserved, records)
    model, _ = load_model(config, path, device="cpu")
    # Turns are sampled in the dtype in which the trainer computes. The weights are cast before they are moved, since a
    # GPU may not hold them in the dtype in which they are stored.
    model = cast_parameters(model, compute_dtype(config)).to(pick_device(config.model.device))
    own_storages(model)  # so that the engine can free them
    local, replicas = config.generator.local, local_replicas(config)
    make = EngineMemory if in_a_process(config) else LocalEngine
    made = make(
        model,
        policy.tokenizer,
        -(-sequences(config) // replicas),
        context,
        local.fused,
        is_deterministic(config),
        in_flight=config.async_config.in_flight,
        apply_weights=LoraWeights.of(policy.model) if config.model.lora_rank else copy_weights,
        cache_bytes=cache_bytes(model.device, bytes_to_come(policy.model)),
        cuda_graphs=local.cuda_graphs,
        record_experts=config.algorithm.router_replay,
    )
    return _in_processes(made, replicas, model.device.type == "cuda") if isinstance(made, EngineMemory) else made


def colocated(config: Config, engine: Engine, has_copy: bool) -> ServerEngine | ServedWorkers | LocalEngine | None:
    """Return the engine if it frees memory for the trainer during updates, else None. Servers do if they share GPUs
    with the trainer. An embedded engine frees its copy of the weights in main memory, but not with adapters, since the
    base weights are not sent again, and not on a GPU, where it was never tried.

    Args:
        has_copy: whether the engine has its own copy of the weights.
    """
    if isinstance(engine, LocalEngine):
        frees = has_copy and not overlaps(config) and not config.model.lora_rank and engine.model.device.type == "cpu"
        return engine if frees else None
    if not serves(config) or not server_settings(config).colocate:
        return None
    assert isinstance(engine, ServerEngine | ServedWorkers)
    return engine


def _in_processes(memory: EngineMemory, replicas: int, on_gpus: bool) -> Engine:
    threads = torch.get_num_threads()
    if replicas > 1:
        return ReplicatedEngine(memory, replicas, max(1, threads // replicas), on_gpus)
    # Beside the trainer, the engine gets half as many threads, but at least one, since rollouts mostly wait.
    return ProcessEngine(memory, threads=max(1, threads // 2))
