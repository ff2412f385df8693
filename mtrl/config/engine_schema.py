"""Sections of `generator`: the engines that sample turns, and the agent programs that run episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtrl.config.field import number, one_of

CALL_KINDS = ("side", "sub_agent", "retried")
"""Choices of `generator.agent.leave_out`; `mtrl/gateway/conversations.py` finds the calls of each kind."""


@dataclass
class LocalEngineConfig:
    """The embedded engine."""

    fused: bool = True
    """Use the fused decode step where the architecture has one."""
    cuda_graphs: bool = True
    """Replay the fused decode step as CUDA graphs on a GPU, one for each rounded number of rows and tokens."""
    deterministic: bool | None = None
    """Admit turns at points that depend on tokens only, not on time, which exact resume needs. Null: true if rollouts
    and updates do not overlap."""
    process: bool | None = None
    """Run the engine in a separate process, with weights in shared memory. Null: true if rollouts and updates
    overlap, or with several replicas."""
    replicas: int | None = number(None, at_least=1)
    """Number of processes with a copy of the model each, among which the groups are divided; on GPUs, each process
    samples on a GPU of its own. Null: the number of ranks of this machine if several ranks train on GPUs, else 1."""


@dataclass
class ServerConfig:
    """Inference servers of an engine, which mtrl starts and supervises, or which run already."""

    python: str | None = None
    """Interpreter of the engine's own virtual environment; null: that of .venv-vllm or .venv-sglang."""
    urls: list[str] = field(default_factory=list)
    """URLs http://HOST:PORT of servers that run already; empty: mtrl starts the servers."""
    api_key_env: str = "MTRL_ENGINE_KEY"
    """Environment variable with the token of the servers at `urls`; servers that mtrl starts get a new token."""
    replicas: int = number(1, at_least=1)
    """Number of servers to start, each with the whole model (data parallelism)."""
    tensor_parallel_size: int = number(1, at_least=1)
    """Number of GPUs of one replica."""
    devices: list[int] | None = None
    """Indices of the replicas' GPUs among the visible ones (CUDA_VISIBLE_DEVICES), `tensor_parallel_size` for each
    replica, in order; null: the GPUs that the trainers do not use, or with `colocate` the GPUs that they use."""
    prefix_caching: bool = True
    """Cache the keys and values of a conversation for its next turn."""
    args: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the server, by their names on its command line; null removes an argument that mtrl
    passes."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the server."""
    weight_sync: str = one_of("disk", "distributed", "tensor")
    """Transport of new weights to the servers. disk: safetensors in `sync_folder` | distributed: broadcast by NCCL or
    gloo | tensor: shared memory, or CUDA IPC to servers that see the GPU of rank 0"""
    sync_delta: bool = False
    """distributed, vLLM only: broadcast the elements that changed since the last weights instead of all of them. Every
    worker of a server then keeps a copy of the whole weights in main memory."""
    sync_folder: str | None = None
    """disk: a folder that trainer and servers can access; null: shared memory of this machine."""
    lora: str = one_of("merged", "adapter")
    """Weights that are sent with model.lora_rank. merged: whole weights with the adapters merged in | adapter: the
    adapters only, which the server applies"""
    pause_mode: str | None = None
    """Effect of new weights on turns that are being sampled, as the engine names it; null: as
    `async_config.in_flight` requires."""
    colocate: bool = False
    """Servers and trainers share GPUs: the servers free their memory while the policy is updated."""
    canary_tolerance: float | None = number(None, at_least=0)
    """Largest allowed mean difference between the log-probs of a server and of the trainer, in nats per token. After
    each change of weights every server samples 64 tokens for this check. Null: 0.001 in float32, 0.1 in half precision;
    0 skips the check."""
    start_timeout: float = number(600.0, above=0)
    """Time limit for a server to become ready, in seconds."""
    request_timeout: float = number(600.0, above=0)
    """Time limit of one turn, in seconds."""
    sync_timeout: float = number(300.0, above=0)
    """Time limit of each step of a weight sync, in seconds."""
    retries: int = number(3, at_least=0)
    """Maximum number of retries of a turn, on another server if there is one, before its episode fails."""
    restarts: int = number(3, at_least=0)
    """Maximum number of restarts of a server that died or hangs, without a sampled turn in between."""


@dataclass
class VllmConfig(ServerConfig):
    """vLLM servers. `pause_mode`: keep | wait | abort"""


@dataclass
class SglangConfig(ServerConfig):
    """SGLang servers. `pause_mode`: retract | in_place | abort | wait"""


@dataclass
class AgentConfig:
    """An agent program that runs the episodes instead of the environment and calls the policy over HTTP
    (`mtrl/gateway`).

    One of `target`, `command` and `url` names the program; if all are null, the environment runs the episodes.
    """

    target: str | None = None
    """`package.module.function` of a Python function `function(row, client)`, sync or async."""
    command: list[str] | None = None
    """A program and its arguments, started in an empty folder for each episode."""
    url: str | None = None
    """http://HOST:PORT of an agent that runs already; it receives `POST /rollout` for each episode."""
    max_concurrent: int = number(16, at_least=1)
    """Maximum number of programs that run at once."""
    max_calls: int | None = number(None, at_least=1)
    """Maximum number of model calls in an episode; null: generator.max_turns."""
    max_calls_at_once: int = number(8, at_least=1)
    """Maximum number of model calls of one episode that are sampled at the same time; further calls wait."""
    max_requests_per_second: float = number(100.0, above=0, may_be_infinite=True)
    """Maximum number of requests of one episode per second; further requests are refused with status 429 and can be
    retried. inf: no maximum."""
    leave_out: list[str] = field(default_factory=list)
    """Kinds of model calls that become no turns and are not trained: `side` (a conversation of one request beside the
    main one, such as that for a title), `sub_agent` (another conversation of several requests), `retried` (a call of
    the main conversation whose request was sent again)."""
    host: str = "127.0.0.1"
    """Address of this machine at which programs reach the model."""
    port: int = number(0, at_least=0, at_most=65535)
    """Port at that address; 0: a free port."""
    env: dict[str, str] = field(default_factory=dict)
    """command: additional environment variables of the program. They are written to config.yaml, so they must hold no
    secrets."""
    pass_env: list[str] = field(default_factory=list)
    """command: names of environment variables of the trainer, such as keys, that are passed to the program."""
    api_key_env: str = "MTRL_AGENT_KEY"
    """url: environment variable that holds the token for the requests to the agent."""
