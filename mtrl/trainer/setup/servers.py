"""Creation of an engine that runs as servers, from a configuration, and assignment of GPUs to the servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrl.config.derived import SERVER_ALLOWANCE, engine_python, sequences, server_sequences, serves
from mtrl.config.engine_schema import ServerConfig
from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.engines.server.backend import ServerBackend, ServerCommand, ServerPlace
from mtrl.engines.server.engine import ServerEngine, max_in_flight
from mtrl.engines.server.launch import Launch
from mtrl.engines.server.remote import RemoteServerEngine
from mtrl.engines.server.transports import make_sync
from mtrl.engines.server.versions import own_versions, versions_of
from mtrl.engines.sglang.command import sglang_command
from mtrl.engines.sglang.sglang_api import SglangApi
from mtrl.engines.vllm.command import vllm_command
from mtrl.engines.vllm.vllm_api import VllmApi
from mtrl.errors import UserError
from mtrl.rollout.served_workers import ServedWorkers
from mtrl.trainer.canary import TOKENS, Canary
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.loading import compute_dtype, parameters_of, pick_device
from mtrl.trainer.setup.connect import ConnectedModel
from mtrl.trainer.work_thread import WorkThread
from mtrl.types import Row
from mtrl.utils.gpus import listed_gpus
from mtrl.utils.process import allow_open_files
from mtrl.utils.text import one_line

ENGINES = {"vllm": (VllmApi, vllm_command), "sglang": (SglangApi, sglang_command)}
"""API client and start command of each engine."""
HALF_TOLERANCE = 0.1
"""Default tolerance of the canary in half precision, in nats per token: above the means of healthy draws and below
those of wrong matrices (experiments/canary)."""
FLOAT32_TOLERANCE = 1e-3
"""Default tolerance of the canary in float32, in nats per token."""
SPARE_FILES = 512
"""Number of files that the trainer opens beside its connections to servers: data, records, libraries, sandboxes."""
FILES_PER_SERVER = 16
"""Number of files per server besides the connections of turns: its log, its supervisor, and connections for updates and
health checks."""


def server_settings(config: Config) -> ServerConfig:
    """Return the settings of the selected engine."""
    return getattr(config.generator, config.generator.backend)


def server_engine(config: Config, world: World, path: str, model_config: Any, context: int, logs: Path) -> ServerEngine:
    """Start the servers, or connect to servers that run already.

    Args:
        path: folder or Hub name of the model that they start with.
        model_config: Hugging Face configuration of the model.
        context: maximum length of a whole conversation, in tokens.
        logs: folder for the output of the servers.

    Raises:
        UserError: the servers do not start.
    """
    generator, settings, name = config.generator, server_settings(config), config.generator.backend
    api, command = ENGINES[name]
    dtype = str(compute_dtype(config)).removeprefix("torch.")
    at_once = turns_at_once(config, model_config, context)
    launch = Launch(
        settings,
        model=path,
        context=context,
        max_num_seqs=at_once,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        dtype=dtype,
        python="" if settings.urls else engine_python(name, settings.python),
        is_cpu=not torch.cuda.is_available(),
        max_lora_rank=config.model.lora_rank if settings.lora == "adapter" else 0,
    )
    devices = server_devices(name, settings, training_gpus(world.size, pick_device(config.model.device)))
    scaling = config.model.lora_alpha / config.model.lora_rank if config.model.lora_rank else None
    return ServerEngine(
        ServerBackend(name, settings, partial(api, settings=settings), partial(command, launch)),
        make_sync(settings, model=path, dtype=dtype, lora_scaling=scaling),
        vocabulary=model_config.get_text_config().vocab_size,
        context=context,
        max_num_seqs=at_once,
        in_flight=config.async_config.in_flight,
        log_folder=logs,
        devices=devices,
    )


def remote_engine(config: Config, model_config: Any, context: int, limit: int) -> RemoteServerEngine:
    """Return the engine of a rollout worker, which sends turns to servers that the leader has started.

    Args:
        model_config: Hugging Face configuration of the model.
        context: maximum length of a whole conversation, in tokens.
        limit: maximum number of turns of this worker in flight per server.
    """
    settings, name = server_settings(config), config.generator.backend
    backend = ServerBackend(name, settings, partial(ENGINES[name][0], settings=settings), _no_command)
    vocabulary = model_config.get_text_config().vocab_size
    return RemoteServerEngine(backend, vocabulary=vocabulary, context=context, limit=limit)


def _no_command(place: ServerPlace) -> ServerCommand:
    raise NotImplementedError("only the leader starts servers")


def check_servers(config: Config, world: World) -> None:
    """Check before models are loaded that this machine can run the servers of the configuration, and raise its limit
    of open files as far as they need it. Servers at `urls` are not contacted.

    Raises:
        UserError: the machine has too few GPUs or open files, the servers cannot see the GPU from which weights are
            sent, or the versions of NCCL differ.
    """
    if not serves(config):
        return
    settings, name = server_settings(config), config.generator.backend
    devices = server_devices(name, settings, training_gpus(world.size, pick_device(config.model.device)))
    _check_open_files(name, settings, sequences(config))
    if devices is None or (config.model.lora_rank and settings.lora == "adapter"):
        return
    if settings.weight_sync == "tensor":
        _check_shared_gpu(name, settings, devices, torch.cuda.current_device())
    elif settings.weight_sync == "distributed":
        _check_nccl(name, engine_python(name, settings.python))


def _check_shared_gpu(name: str, settings: ServerConfig, devices: Sequence[int], source: int) -> None:
    """Check that every replica sees the GPU `source`, which holds the weights for CUDA IPC: a process can map memory
    only of a GPU that it sees."""
    each = settings.tensor_parallel_size
    for i in range(settings.replicas):
        own = devices[i * each : (i + 1) * each]
        if source not in own:
            raise UserError(
                f"generator.{name}.weight_sync=tensor shares weights on GPU {source}, and replica {i} sees only "
                f"{', '.join(map(str, own))}; use generator.{name}.weight_sync="
                + ("disk" if settings.colocate else "distributed, or disk")
                + f", or one replica on that GPU (generator.{name}.colocate=true)"
            )


def _check_nccl(name: str, python: str) -> None:
    """Check that trainer and engine have the same NCCL, which refuses a group of different versions."""
    try:
        ours, theirs = own_versions(), versions_of(python)
    except (RuntimeError, PackageNotFoundError) as error:
        raise UserError(f"the versions of torch cannot be compared with those of {name}: {one_line(error)}") from error
    if ours.nccl != theirs.nccl:
        raise UserError(
            f"generator.{name}.weight_sync=distributed needs the same NCCL on both sides, and the trainer has NCCL "
            f"{ours.nccl} (torch {ours.torch}), {name} has {theirs.nccl} (torch {theirs.torch}); run pip install "
            f"torch=={theirs.torch.partition('+')[0]} for the trainer, or use generator.{name}.weight_sync=disk"
        )


def _check_open_files(name: str, settings: ServerConfig, turns: int) -> None:
    """Check that this process can open a connection for every turn in flight."""
    servers = len(settings.urls) or settings.replicas
    needed = SPARE_FILES + servers * (FILES_PER_SERVER + max_in_flight(turns))
    limit = allow_open_files(needed)
    if limit is not None and limit < needed:
        raise UserError(
            f"generator.max_num_seqs={turns} on {servers} servers of {name} needs {needed} open files, and this "
            f"process may open {limit} (ulimit -Hn); raise the limit, or lower generator.max_num_seqs"
        )


def turns_at_once(config: Config, model_config: Any, context: int) -> int:
    """Return the number of turns that one server samples at once: as configured, or by the memory of its GPUs.

    Args:
        model_config: Hugging Face configuration of the model.
        context: maximum length of a whole conversation, in tokens.
    """
    settings = server_settings(config)
    if config.generator.max_num_seqs is not None or settings.urls or not torch.cuda.is_available():
        return sequences(config)
    size, text = compute_dtype(config).itemsize, model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    workers = settings.tensor_parallel_size
    share = int(config.generator.gpu_memory_utilization * torch.cuda.get_device_properties(0).total_memory)
    room = share - parameters_of(model_config) * size // workers - SERVER_ALLOWANCE
    conversation = 2 * text.num_hidden_layers * heads * width * size * context // min(workers, heads)
    return server_sequences(room, conversation)


def server_devices(name: str, settings: ServerConfig, trainers: int) -> Sequence[int] | None:
    """Return the indices of the GPUs of all replicas, in order; None without a GPU, or for servers that run already.

    Args:
        name: name of the engine.
        trainers: number of GPUs of this machine that ranks train on, which are the first ones.

    Raises:
        UserError: there are not enough GPUs, or a configured index does not exist.
    """
    if settings.urls or not torch.cuda.is_available():
        return None
    found, needed = torch.cuda.device_count(), settings.replicas * settings.tensor_parallel_size
    listed = listed_gpus()
    shown = "this machine has" if listed is None else f"CUDA_VISIBLE_DEVICES={','.join(listed)} shows"
    if settings.devices is not None:
        if max(settings.devices) >= found:
            raise UserError(
                f"generator.{name}.devices={list(settings.devices)} names GPU {max(settings.devices)}, and "
                f"{shown} {found}; name indices from 0 to {found - 1}"
            )
        return list(settings.devices)
    free = list(range(trainers) if settings.colocate else range(trainers, found))
    if len(free) < needed:
        raise UserError(
            f"generator.{name}.replicas={settings.replicas} x generator.{name}.tensor_parallel_size="
            f"{settings.tensor_parallel_size} need {needed} GPUs, and {shown} {found}, of which there are {len(free)} "
            + (
                "that ranks train on; lower one of them"
                if settings.colocate
                else f"beside the {trainers} that ranks train on; start fewer ranks, or share theirs by "
                f"generator.{name}.colocate=true"
            )
        )
    return free[:needed]


def training_gpus(world_size: int, device: torch.device) -> int:
    """Return the number of GPUs of this machine that ranks train on."""
    if device.type != "cuda":
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if world_size > 1 else (device.index or 0) + 1


def are_external(config: Config) -> bool:
    """Return whether mtrl uses servers that it did not start, so that their weights are unknown."""
    return serves(config) and bool(server_settings(config).urls)


def make_canary(
    config: Config,
    model: ConnectedModel,
    rows: Sequence[Row],
    logprobs: Callable[[Sequence[MicroBatch]], list[Tensor]],
    work_thread: WorkThread,
) -> Canary | None:
    """Return the check that compares servers with the trainer; None for the local engine, without training rows, or
    with a tolerance of 0.

    Args:
        rows: the training rows; the check samples from the first one.
        logprobs: the trainer's log-probs of micro-batches.
    """
    if not serves(config) or not rows:
        return None
    assert isinstance(model.engine, ServerEngine | ServedWorkers)
    tolerance = server_settings(config).canary_tolerance
    if tolerance is None:
        tolerance = FLOAT32_TOLERANCE if compute_dtype(config) == torch.float32 else HALF_TOLERANCE
    if tolerance == 0:
        return None
    prompt = model.codec.renderer.render_ids(rows[0]["prompt"], add_generation_prompt=True)
    prompt = prompt[: max(1, model.loop.limits.max_context_length - TOKENS)]
    return Canary(model.engine, logprobs, work_thread, prompt, model.sampling, tolerance, config.generator.backend)
