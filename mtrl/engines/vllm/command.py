"""The command line of a vLLM server, made from the settings that all engines share."""

from __future__ import annotations

from typing import Any

from mtrl.engines.server.backend import ServerCommand, ServerPlace
from mtrl.engines.server.launch import Launch
from mtrl.engines.vllm.gate import TOKEN
from mtrl.errors import UserError

SERVE = "mtrl.engines.vllm.serve"
HOST = "127.0.0.1"
OURS = {
    "model": "model.path names the model",
    "host": "servers listen on this machine only",
    "port": "mtrl chooses a free port",
    "uds": "mtrl chooses a free port",
    "api_key": "every server gets a new token, which no command line shows",
    "middleware": "mtrl's middleware checks the token",
    "config": "write its arguments one by one",
    "weight_transfer_config": "generator.vllm.weight_sync selects how weights are sent",
    "enable_scale_out": "mtrl requests turns through it",
    "enable_prompt_tokens_details": "mtrl counts cached tokens by it",
    "logprobs_mode": "log-probs must be those of the sampling distribution",
    "data_parallel_size": "generator.vllm.replicas=N starts N servers",
    "api_server_count": "generator.vllm.replicas=N starts N servers",
    "tensor_parallel_size": "generator.vllm.tensor_parallel_size=N sets it",
    "pipeline_parallel_size": "mtrl gives a server the GPUs of generator.vllm.tensor_parallel_size only",
    "headless": "the server must answer requests",
    "grpc": "mtrl uses HTTP",
}
"""Arguments that `generator.vllm.args` may not have, and the reason."""
CPU_CACHE = 256 * 2**20
"""Size of the key-value cache without a GPU, in bytes. By default vLLM would take 92% of the machine's memory."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""


def vllm_command(launch: Launch, place: ServerPlace) -> ServerCommand:
    """Return the command that starts one server; `serve.py` adds the arguments that every server of mtrl needs.

    Raises:
        UserError: `generator.vllm.args` has an argument that the user may not set, or vLLM supports no adapters of this
            rank.
    """
    settings = launch.settings
    arguments: dict[str, Any] = {
        "model": launch.model,
        "host": HOST,
        "port": place.port,
        "dtype": launch.dtype,
        "max_model_len": launch.context,
        "max_num_seqs": launch.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": settings.prefix_caching,
        "generation_config": "vllm",  # ignores the checkpoint's generation_config.json
        "disable_uvicorn_access_log": True,
    }
    if launch.is_cpu:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE, "block_size": 32}
        # Chunked prefill of a seeded turn crashes the server: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        if settings.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    else:
        arguments["gpu_memory_utilization"] = launch.gpu_memory_utilization
        arguments["enable_sleep_mode"] = settings.colocate or None
    if rank := launch.max_lora_rank:
        # Two adapters at once: the newest, and the previous one of turns in flight.
        arguments |= {"enable_lora": True, "max_lora_rank": _rank(rank), "max_loras": 2, "max_cpu_loras": 4}
    arguments = launch.arguments(arguments, OURS, "_")
    flags = {f"no_{name}" if value is False else name: value is False or value for name, value in arguments.items()}
    return launch.command(SERVE, flags, _environment(launch), TOKEN, place)


def _rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` of vLLM that is at least `rank`."""
    for room in RANKS:
        if rank <= room:
            return room
    raise UserError(f"model.lora_rank={rank} is too large for vLLM's adapters ({RANKS[-1]}); set vllm.lora=merged")


def _environment(launch: Launch) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1"}
    if launch.is_cpu:
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server is bound to the first cores
            "TORCHDYNAMO_DISABLE": "1",  # else g++ compiles the code of log-probs for seconds, or fails
        }
        if launch.settings.tensor_parallel_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # model and scheduler in one process: a faster start
    return env
