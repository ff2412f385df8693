"""The command line of an SGLang server, made from the settings that all engines share."""

from __future__ import annotations

from typing import Any

from mtrl.engines.server.backend import ServerCommand, ServerPlace
from mtrl.engines.server.launch import Launch
from mtrl.engines.sglang.access import TOKEN

MODULE = "mtrl.engines.sglang.serve"
HOST = "127.0.0.1"
OURS = {
    "host": "servers listen on this machine only",
    "port": "mtrl chooses a free port",
    "api-key": "every server gets a new token, which no command line shows",
    "admin-api-key": "every server gets a new token, which no command line shows",
    "model-path": "model.path names the model",
    "model": "model.path names the model",
    "config": "write its arguments one by one",
    "weight-version": "the trainer sets the policy version",
    "tensor-parallel-size": "generator.sglang.tensor_parallel_size=N sets it",
    "tp-size": "generator.sglang.tensor_parallel_size=N sets it",
    "tp": "generator.sglang.tensor_parallel_size=N sets it",
    "data-parallel-size": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
    "dp-size": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
    "dp": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
    "pipeline-parallel-size": "mtrl gives a server the GPUs of generator.sglang.tensor_parallel_size only",
    "pp-size": "mtrl gives a server the GPUs of generator.sglang.tensor_parallel_size only",
}
"""Arguments that `generator.sglang.args` may not have, and the reason. (SGLang cannot sync weights to its own
data-parallel replicas.)"""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that adapters may have; `generator.sglang.args.lora-target-modules` overrides them."""
CPU_TOKENS = 32768
"""Maximum size of the key-value cache without a GPU, in tokens, unless one conversation needs more. By default SGLang
would take most of the machine's memory."""


def sglang_command(launch: Launch, place: ServerPlace) -> ServerCommand:
    """Return the command that starts one server.

    Raises:
        UserError: `generator.sglang.args` has an argument that the user may not set.
    """
    settings = launch.settings
    arguments: dict[str, Any] = {
        "model-path": launch.model,
        "host": HOST,
        "port": place.port,
        "dtype": launch.dtype,
        "context-length": launch.context,
        "max-running-requests": launch.max_num_seqs,
        "tp-size": settings.tensor_parallel_size,
        "weight-version": "0",
        "sampling-defaults": "openai",  # ignores the checkpoint's generation_config.json
        "enable-cache-report": True,
        "disable-radix-cache": not settings.prefix_caching,
        "schedule-policy": "lpm",  # longest prefix first: a group's prompt is computed once
        "sleep-on-idle": True,
    }
    if launch.is_cpu:
        arguments |= _without_gpu(launch)
    else:
        arguments |= {"mem-fraction-static": launch.gpu_memory_utilization, "enable-memory-saver": settings.colocate}
    if launch.max_lora_rank:
        arguments |= _with_adapters(launch)
    return launch.command(MODULE, launch.arguments(arguments, OURS, "-"), _environment(launch), TOKEN, place)


def _without_gpu(launch: Launch) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-overlap-schedule": True,
        "max-total-tokens": max(launch.context, min(launch.context * launch.max_num_seqs, CPU_TOKENS)),
    }


def _with_adapters(launch: Launch) -> dict[str, Any]:
    """Return the arguments for adapters. A batch may have three: the newest, the previous one of turns in flight, and
    no adapter."""
    adapters: dict[str, Any] = {"enable-lora": True, "max-lora-rank": launch.max_lora_rank, "max-loras-per-batch": 3}
    # Without target modules, SGLang requires an adapter at its start.
    adapters["lora-target-modules"] = LINEAR
    if launch.settings.colocate and not launch.is_cpu:
        adapters["enable-weights-cpu-backup"] = True  # else the base weights are lost while the server sleeps
    return adapters | ({"lora-backend": "torch_native"} if launch.is_cpu else {})


def _environment(launch: Launch) -> dict[str, str]:
    """Return the environment variables. Without a GPU and with several ranks, SGLang needs the cores of each rank."""
    ranks = range(launch.settings.tensor_parallel_size)
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, ranks))} if launch.is_cpu and len(ranks) > 1 else {}
