"""The command line of an SGLang server, from the settings that all engines have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtrl.config.engine_schema import ServerConfig
from mtrl.errors import UserError
from mtrl.generator.engines.server.backend import Command, Place
from mtrl.generator.engines.sglang.secret import TOKEN

MODULE = "mtrl.generator.engines.sglang.serve"
HOST = "127.0.0.1"
OURS = {
    "host": "servers listen on this machine only",
    "port": "a free port is taken",
    "api-key": "every server gets a new token, which no command line shows",
    "admin-api-key": "every server gets a new token, which no command line shows",
    "model-path": "model.path names the model",
    "model": "model.path names the model",
    "config": "give its arguments one by one",
    "weight-version": "policy versions are the trainer's",
    "tensor-parallel-size": "generator.sglang.tensor_parallel_size=N is the key",
    "tp-size": "generator.sglang.tensor_parallel_size=N is the key",
    "tp": "generator.sglang.tensor_parallel_size=N is the key",
    "data-parallel-size": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
    "dp-size": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
    "dp": "generator.sglang.replicas=N starts N servers, whose weights can be synced",
}
"""Arguments that `generator.sglang.args` may not have, and why. (SGLang cannot sync weights of replicas of its own.)"""
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Layers that adapters may have; `generator.sglang.args.lora-target-modules` names others."""
CPU_TOKENS = 32768
"""Without a GPU keys and values of so many tokens are kept, unless one conversation needs more: SGLang would take most
of the machine's memory."""


def sglang_command(
    settings: ServerConfig,
    *,
    model: str,
    context: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
    dtype: str,
    python: str,
    is_cpu: bool,
    max_lora_rank: int,
    place: Place,
) -> Command:
    """How one server is started.

    Args:
        context: tokens of a whole conversation.
        max_num_seqs: turns that are sampled at once.
        gpu_memory_utilization: share of the GPU's memory for weights, keys and values.
        dtype: float32, bfloat16 or float16.
        is_cpu: whether it has to do without a GPU.
        max_lora_rank: rank of the adapters that it will be given; 0: none.

    Raises:
        UserError: `generator.sglang.args` has an argument that is not the user's.
    """
    arguments: dict[str, Any] = {
        "model-path": model,
        "host": HOST,
        "port": place.port,
        "dtype": dtype,
        "context-length": context,
        "max-running-requests": max_num_seqs,
        "tp-size": settings.tensor_parallel_size,
        "weight-version": "0",
        "sampling-defaults": "openai",  # nothing of the checkpoint's generation_config.json
        "enable-cache-report": True,
        "disable-radix-cache": not settings.prefix_caching,
        "schedule-policy": "lpm",  # longest prefix first: a group's prompt is computed once
        "sleep-on-idle": True,
    }
    if is_cpu:
        arguments |= _without_gpu(context, max_num_seqs)
    else:
        arguments |= {"mem-fraction-static": gpu_memory_utilization, "enable-memory-saver": settings.colocate}
    if max_lora_rank:
        arguments |= _with_adapters(max_lora_rank, is_cpu)
    arguments |= _chosen(settings.args)
    argv = [python, "-m", MODULE, *_words(arguments)]
    return Command(argv, _environment(settings, place, is_cpu))


def _without_gpu(context: int, max_num_seqs: int) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-overlap-schedule": True,
        "max-total-tokens": max(context, min(context * max_num_seqs, CPU_TOKENS)),
    }


def _with_adapters(rank: int, is_cpu: bool) -> dict[str, Any]:
    """Three at once: the newest, the one that turns in flight still have, and none."""
    adapters: dict[str, Any] = {"enable-lora": True, "max-lora-rank": rank, "max-loras-per-batch": 3}
    # Without these SGLang would have to be given an adapter at its start.
    adapters["lora-target-modules"] = LINEAR
    return adapters | ({"lora-backend": "torch_native"} if is_cpu else {})


def _chosen(args: Mapping[str, Any]) -> dict[str, Any]:
    """`generator.sglang.args` by SGLang's own names, however they are written (`--tp-size`, `tp_size`)."""
    named = {str(name).lstrip("-").replace("_", "-"): value for name, value in args.items()}
    for name in named:
        if name in OURS:
            raise UserError(f"generator.sglang.args has {name}, which is not to be set: {OURS[name]}; take it out")
    return named


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """True is a bare flag; None and False are left out; a list is several words, a mapping is JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if isinstance(value, Mapping):
            words.append(json.dumps(dict(value)))
        elif isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def _environment(settings: ServerConfig, place: Place, is_cpu: bool) -> dict[str, str]:
    # gloo would listen at the address that the machine's name leads to, and it asks nobody for a password.
    ours = {"TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    if is_cpu:
        ranks = range(settings.tensor_parallel_size)
        # With two threads a small model is many times slower. Ranks are bound to cores, which SGLang must be told.
        ours |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        if len(ranks) > 1:
            ours["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, ranks))
    elif place.devices is not None:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
    return {**ours, **settings.env, TOKEN: place.token}
