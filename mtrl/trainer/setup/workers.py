"""Start of rollout workers from a configuration, and what each of them makes in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtrl.command.checks import import_plugins
from mtrl.config.derived import is_deterministic, overlaps, sequences
from mtrl.config.schema import Config
from mtrl.engines.base import Engine
from mtrl.engines.local.engine import LocalEngine, copy_weights
from mtrl.engines.server.engine import ServerEngine
from mtrl.environments.factory import task_without_rows
from mtrl.models.lora import LoraWeights
from mtrl.rollout.episode import BaseLoop
from mtrl.rollout.resources import WorkerResources, byte_count
from mtrl.rollout.rollouts import Rollouts
from mtrl.rollout.served_workers import ServedWorkers
from mtrl.rollout.workers import WorkerRollouts, Workers
from mtrl.trainer.loading import cast_parameters, compute_dtype, load_model, load_shape, pick_device
from mtrl.trainer.setup.connect import connect
from mtrl.trainer.setup.frozen import frozen_engine
from mtrl.trainer.setup.placement import cache_bytes
from mtrl.trainer.setup.servers import remote_engine
from mtrl.trainer.update.policy import Policy
from mtrl.utils.process import settle

ApplyWeights = Callable[[Any, Mapping[str, Tensor]], None]


def start_workers(config: Config, path: str, policy: Policy) -> Workers:
    """Start the rollout workers, and return when all of them can play.

    Args:
        path: folder or Hub name of the policy at the start of the run, which all workers can read.

    Raises:
        UserError: Ray is missing or cannot be started, or a worker cannot make its task, model or engine.
    """
    from mtrl.rollout.cluster import RayCluster

    settings = config.rollouts
    apply_weights: ApplyWeights = copy_weights
    if config.model.lora_rank:  # each worker has the frozen matrices already
        apply_weights = replace(LoraWeights.of(policy.model), base={})
    # A worker computes with the same number of threads on every machine, since the last bits depend on it. While rank 0
    # trains, it needs half of the cores itself.
    threads = max(1, torch.get_num_threads() // (settings.workers * (2 if overlaps(config) else 1)))
    make = partial(make_episodes, config, path, apply_weights)
    arguments = (make, config.seed, partial(prepare_process, threads))
    size = sum(parameter.nbytes for parameter in policy.model.parameters())
    cluster = RayCluster(arguments, settings.workers, resources_of(config), size)
    workers = Workers(cluster, settings.workers, settings.timeout)
    asyncio.run(workers.start())
    return workers


def start_served_workers(config: Config, path: str, servers: ServerEngine) -> ServedWorkers:
    """Start rollout workers that send their turns to these servers, and return when all of them can play. If they do
    not start, the servers are ended.

    Args:
        path: folder or Hub name of the policy at the start of the run, whose tokenizer all workers can read.

    Raises:
        UserError: Ray is missing or cannot be started, or a worker cannot make its task or reach the servers.
    """
    from mtrl.rollout.cluster import RayCluster

    settings = config.rollouts
    limit = -(-servers.server_group.router.limit // settings.workers)
    make = partial(make_served_episodes, config, path, limit)
    try:
        arguments = (make, config.seed, partial(prepare_process, 1))
        cluster = RayCluster(arguments, settings.workers, resources_of(config), 0)
        workers = ServedWorkers(cluster, settings.workers, settings.timeout, servers)
        asyncio.run(workers.start())
    except BaseException:
        servers.server_group.kill()
        raise
    return workers


def resources_of(config: Config) -> WorkerResources:
    """Return what Ray reserves for a worker: for its engine and episodes, and for its environments."""
    settings, environments = config.rollouts, config.environment.resources
    memory = 0 if environments.memory is None else byte_count(environments.memory)
    return WorkerResources(settings.cpus + environments.cpu, settings.gpus, memory, environments.custom)


def prepare_process(threads: int) -> None:
    """Set the number of threads of PyTorch and the garbage collector of a worker's process, as a run sets its own."""
    torch.set_num_threads(threads)
    settle()


def make_episodes(config: Config, path: str, apply_weights: ApplyWeights) -> BaseLoop[Any]:
    """Make the loop of the episodes in a worker's process, with an engine of its own. The rows of the task are not
    loaded, since the leader sends each row.

    Raises:
        UserError: the task, the model or the engine cannot be made.
    """
    import_plugins(config.plugins)
    task = task_without_rows(config)
    model, tokenizer = load_model(config, path, device="cpu")
    model = cast_parameters(model, compute_dtype(config)).to(pick_device(config.model.device))

    def engine(context: int) -> Engine:
        return LocalEngine(
            model,
            tokenizer,
            sequences(config),
            context,
            config.generator.local.fused,
            is_deterministic(config),
            in_flight=config.async_config.in_flight,
            apply_weights=apply_weights,
            cache_bytes=cache_bytes(model.device, 0),
            cuda_graphs=config.generator.local.cuda_graphs,
            record_experts=config.algorithm.router_replay,
        )

    return connect(config, task, model.config, tokenizer, [], engine, frozen_engine(config, path)).loop


def make_served_episodes(config: Config, path: str, limit: int) -> BaseLoop[Any]:
    """Make the loop of the episodes in the process of a worker whose turns are sampled by servers.

    Args:
        limit: maximum number of turns of this worker in flight per server.

    Raises:
        UserError: the task or the tokenizer cannot be made.
    """
    import_plugins(config.plugins)
    task, (shape, tokenizer) = task_without_rows(config), load_shape(config, path)

    def engine(context: int) -> Engine:
        return remote_engine(config, shape, context, limit)

    return connect(config, task, shape, tokenizer, [], engine).loop


def rollouts_of(loop: BaseLoop[Any], engine: Engine, config: Config) -> Rollouts:
    """Return the rollouts of a run: by rollout workers if `engine` stands for them, else by this process."""
    share = config.environment.max_failed_share
    if isinstance(engine, Workers):
        return WorkerRollouts(loop, config.seed, share, workers=engine)
    return Rollouts(loop, config.seed, share)
