"""Settings of the engines that turns are sampled by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LocalEngineConfig:
    """The embedded engine."""

    fused: bool = True
    """Use the fused decode step where the architecture has one."""
    deterministic: bool | None = None
    """Admit turns at points that depend on tokens only, not on time: needed for exact resume. Null: where rollouts and
    updates do not overlap."""
    process: bool | None = None
    """Run in a process of its own, with weights in shared memory. Null: where rollouts and updates overlap."""


@dataclass
class ServerConfig:
    """Servers of an engine: started and supervised here, or running already."""

    python: str | None = None
    """Interpreter of the engine's own virtual environment; null: the one that scripts/install_engine.py made."""
    urls: list[str] = field(default_factory=list)
    """Servers that run already, http://HOST:PORT each; empty: they are started here."""
    api_key_env: str = "MTRL_ENGINE_KEY"
    """Environment variable with the token of the servers at `urls`; servers that are started here get a new one."""
    replicas: int = 1
    """Servers that are started, each with the whole model: data parallelism."""
    tensor_parallel_size: int = 1
    """GPUs of one replica."""
    devices: list[int] | None = None
    """GPUs of the replicas, `tensor_parallel_size` each, in order; null: those that the trainers do not use, or with
    `colocate` those that they use."""
    prefix_caching: bool = True
    """Keep keys and values of a conversation for its next turn."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the server, by their names on its command line; null takes away one that is given here."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the server."""
    weight_sync: str = "disk"
    """How new weights reach the servers. disk: safetensors in `sync_folder` | distributed: broadcast, NCCL or gloo |
    tensor: shared memory, CUDA IPC on a GPU"""
    sync_folder: str | None = None
    """disk: a folder that trainer and servers see; null: shared memory of this machine."""
    lora: str = "merged"
    """What is sent with model.lora_rank. merged: whole weights with the adapters in them | adapter: the adapters, which
    the server applies"""
    pause_mode: str | None = None
    """What new weights do to turns that are being sampled, in the engine's words; null: what async_config.in_flight
    says."""
    colocate: bool = False
    """Servers and trainers share GPUs: the servers free their memory while the policy learns."""
    canary_tolerance: float | None = None
    """After new weights every server samples a few tokens, and the trainer's log-probs of them may differ by so much;
    null: 0.001 in float32, 0.3 in half precision. 0 leaves the check out."""
    start_timeout: float = 600.0
    """Seconds until a server must be ready."""
    request_timeout: float = 600.0
    """Seconds that one turn may take."""
    sync_timeout: float = 300.0
    """Seconds that each step of a weight sync may take."""
    retries: int = 3
    """How often a turn is asked again, elsewhere where there are others, before its episode fails."""
    restarts: int = 3
    """How often a server that died or hangs is started again without a turn sampled in between."""


@dataclass
class VllmConfig(ServerConfig):
    """vLLM servers. `pause_mode`: keep | wait | abort"""


@dataclass
class SglangConfig(ServerConfig):
    """SGLang servers. `pause_mode`: retract | in_place | abort | wait"""
