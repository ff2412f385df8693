"""The placement of the ranks and servers of a configuration on its machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrl.config.derived import distils, prefers_bfloat16, serves
from mtrl.config.derived import ranks as launched_ranks
from mtrl.config.engine_schema import ServerConfig
from mtrl.config.schema import Config
from mtrl.doctor.architecture import Architecture, find

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


@dataclass(frozen=True)
class MemoryLayout:
    """The numbers that determine how memory is divided among GPUs."""

    ranks: int
    """Number of ranks of the whole job."""
    ranks_here: int
    """Number of ranks of the first machine."""
    shards: int
    """Number of ranks among which one copy of the models is sharded; 1: each rank holds whole models."""
    sharded: bool
    """Whether `fully_shard` is applied to the models; a single rank uses it too for mixed precision or CPU offload."""
    stored: int
    """Bytes of a weight in storage."""
    computed: int
    """Bytes of a weight in the forward and the backward pass."""
    servers: ServerConfig | None
    """Settings of the servers; None if the embedded engine samples."""
    servers_here: bool
    """Whether the run starts the servers, on the GPUs of the first machine."""

    @classmethod
    def of(cls, config: Config, bfloat16: bool = True) -> MemoryLayout:
        """Return the numbers of a configuration. `bfloat16` is whether the ranks' devices multiply bfloat16."""
        machines = config.placement.machines
        here = ranks_here(config.placement)
        ranks = here * machines
        fsdp = config.trainer.fsdp
        dtype = "bfloat16" if bfloat16 and prefers_bfloat16(config) else fsdp.param_dtype
        sharded = ranks > 1 or dtype is not None or fsdp.cpu_offload
        servers = getattr(config.generator, config.generator.backend) if serves(config) else None
        return cls(
            ranks=ranks,
            ranks_here=here,
            shards=ranks // fsdp.replicas if sharded else 1,
            sharded=sharded,
            stored=BYTES[config.model.dtype],
            computed=BYTES[dtype or config.model.dtype],
            servers=servers,
            servers_here=servers is not None and not servers.urls,
        )

    @property
    def colocated(self) -> bool:
        """Whether servers and ranks share GPUs."""
        return self.servers is not None and self.servers_here and self.servers.colocate

    @property
    def server_gpus(self) -> int:
        """Number of GPUs of all servers that the run starts."""
        if self.servers is None or not self.servers_here:
            return 0
        return self.servers.replicas * self.servers.tensor_parallel_size

    @property
    def gpus_needed(self) -> int:
        """Number of GPUs that the first machine needs."""
        return max(self.ranks_here, self.server_gpus) if self.colocated else self.ranks_here + self.server_gpus


def ranks_here(placement: Any) -> int:
    """Return the number of ranks of each machine, from its placement or else from the ranks that were started."""
    return placement.ranks or max(1, launched_ranks() // max(1, placement.machines))


def context_of(config: Config, model: Architecture) -> int:
    """Return the length of the longest conversation, in tokens."""
    return config.generator.max_context_length or model.max_position_embeddings


def recomputed_layers(config: Config, model: Architecture) -> int:
    """Return the number of layers that the backward pass recomputes."""
    trainer, layers = config.trainer, model.num_hidden_layers
    return min(trainer.recomputed_layers or layers, layers) if trainer.gradient_checkpointing else 0


def can_share_sequences(config: Config) -> bool:
    """Whether the settings allow ranks to share sequences (`trainer.sequence_parallel`)."""
    return config.model.attn_implementation == "sdpa" and not config.algorithm.expert_balance_coef


def needs_reference(config: Config) -> bool:
    """Whether a second copy of the policy is needed for the KL; with adapters, the policy without them usually serves
    instead."""
    algorithm = config.algorithm
    counts = bool(algorithm.kl_loss_coef or algorithm.kl_reward_coef)
    return counts and not (config.model.lora_rank and not algorithm.kl_reference)


def teacher_of(config: Config) -> Architecture | None:
    """Return the architecture of the teacher that the ranks load; None without one.

    Raises:
        UserError: the sizes of the teacher are unknown.
    """
    path = config.distillation.teacher.path
    return find(path, "distillation.teacher.path") if path is not None and distils(config) else None


def needs_critic(config: Config) -> bool:
    from mtrl.algorithms.registry import find_estimator

    estimator: Any = find_estimator(config.algorithm.advantage_method)
    return bool(estimator.needs_critic)
