"""The command line of a vLLM server, from the settings that all engines have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mtrl.config.engine_schema import ServerConfig
from mtrl.errors import UserError
from mtrl.generator.engines.server.backend import Command, Place
from mtrl.generator.engines.vllm.gate import TOKEN

SERVE = "mtrl.generator.engines.vllm.serve"
HOST = "127.0.0.1"
OURS = {
    "model": "model.path names the model",
    "host": "servers listen on this machine only",
    "port": "a free port is taken",
    "uds": "a free port is taken",
    "api_key": "every server gets a new token, which no command line shows",
    "middleware": "it checks the token",
    "config": "give its arguments one by one",
    "weight_transfer_config": "generator.vllm.weight_sync says how weights come",
    "enable_scale_out": "turns are asked for there",
    "enable_prompt_tokens_details": "cached tokens are counted",
    "logprobs_mode": "log-probs are those of the policy that sampled",
    "data_parallel_size": "generator.vllm.replicas=N starts N servers",
    "api_server_count": "generator.vllm.replicas=N starts N servers",
    "tensor_parallel_size": "generator.vllm.tensor_parallel_size=N is the key",
    "headless": "a server has to answer",
    "grpc": "servers are asked over HTTP",
}
"""Arguments that `generator.vllm.args` may not have, and why."""
CPU_CACHE = 256 * 2**20
"""Bytes of keys and values without a GPU: vLLM would take 92% of the machine's memory."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""`--max-lora-rank` of vLLM."""


def vllm_command(
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
    """How one server is started; `serve.py` adds what every server of ours needs.

    Args:
        context: tokens of a whole conversation.
        max_num_seqs: turns that are sampled at once.
        gpu_memory_utilization: share of the GPU's memory for weights, keys and values.
        dtype: float32, bfloat16 or float16.
        is_cpu: whether it has to do without a GPU.
        max_lora_rank: rank of the adapters that it will be given; 0: none.

    Raises:
        UserError: `generator.vllm.args` has an argument that is not the user's, or no adapter may have this rank.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "host": HOST,
        "port": place.port,
        "dtype": dtype,
        "max_model_len": context,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.prefix_caching,
        "generation_config": "vllm",  # nothing of the checkpoint's generation_config.json
        "disable_uvicorn_access_log": True,
    }
    if is_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE, "block_size": 32}
        # A prompt that is prefilled in parts ends the server: "CPU Generator does not use offset" (turns have seeds).
        arguments["enable_chunked_prefill"] = False
        if settings.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
        arguments["enable_sleep_mode"] = settings.colocate or None
    if max_lora_rank:
        # Two at once: the newest, and the one that turns in flight still have.
        arguments |= {"enable_lora": True, "max_lora_rank": _rank(max_lora_rank), "max_loras": 2, "max_cpu_loras": 4}
    arguments |= _chosen(settings.args)
    return Command([python, "-m", SERVE, *_words(arguments)], _environment(settings, place, is_cpu))


def _rank(rank: int) -> int:
    """The smallest that vLLM has room for."""
    for room in RANKS:
        if rank <= room:
            return room
    raise UserError(f"model.lora_rank={rank} is too large for vLLM's adapters ({RANKS[-1]}); set vllm.lora=merged")


def _chosen(args: Mapping[str, Any]) -> dict[str, Any]:
    """`generator.vllm.args` by vLLM's own names, however they are written (`--max-num-seqs`, `max_num_seqs`)."""
    named = {str(name).lstrip("-").replace("-", "_"): value for name, value in args.items()}
    for name in named:
        if name in OURS:
            raise UserError(f"generator.vllm.args has {name}, which is not to be set: {OURS[name]}; take it out")
    return named


def _words(arguments: Mapping[str, Any]) -> list[str]:
    """True is a bare flag and False its `--no-` form; None is left out; a list is several words, a mapping is JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Mapping):
            words += [f"--{option}", json.dumps(dict(value))]
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *map(str, value)]
        else:
            words += [f"--{option}", str(value)]
    return words


def _environment(settings: ServerConfig, place: Place, is_cpu: bool) -> dict[str, str]:
    ours = {
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # gloo would listen at the address that the machine's name leads to, and it asks nobody for a password.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if is_cpu:
        ours |= {
            # With two threads a small model is many times slower, and vLLM would bind every server to the first cores.
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # else the first log-probs are compiled by g++, for seconds, or not at all
            "CUDA_VISIBLE_DEVICES": "",
        }
        if settings.tensor_parallel_size == 1:
            ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # model and scheduler in one process: a faster start
    elif place.devices is not None:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.devices))
    return {**ours, **settings.env, TOKEN: place.token}
