"""The groups in which ranks share a model, as dimensions of PyTorch's device meshes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from mtrl.errors import UserError

if TYPE_CHECKING:
    from mtrl.config.trainer_schema import FsdpConfig, TrainerConfig


@dataclass(frozen=True)
class ModelParallel:
    """Numbers of ranks that compute a module together, each with a part of its weights."""

    tensor: int = 1
    """Number of consecutive ranks that divide the matrices of a layer, and compute the same tokens."""
    expert: int = 1
    """Number of consecutive ranks that divide the experts of a layer; a multiple of `tensor`."""

    @classmethod
    def of(cls, trainer: TrainerConfig) -> ModelParallel:
        """Return the numbers of a configuration."""
        return cls(trainer.tensor_parallel, trainer.expert_parallel)

    @property
    def is_used(self) -> bool:
        """Whether any module is computed by several ranks together."""
        return max(self.tensor, self.expert) > 1


WHOLE = ModelParallel()
"""Every rank computes whole modules."""


@dataclass(frozen=True)
class Meshes:
    """The groups of this rank."""

    data: DeviceMesh
    """Mesh of `fully_shard`: [shards], or with `replicas` > 1 (HSDP) [replicas, shards]. Its ranks compute different
    tokens with the same parts of the modules."""
    tensor: DeviceMesh | None = None
    """[tensor] ranks that divide matrices; None without model parallelism."""
    expert_data: DeviceMesh | None = None
    """Mesh of `fully_shard` for the experts, like `data`; None without model parallelism."""
    expert: DeviceMesh | None = None
    """[expert] ranks that divide experts; None without model parallelism."""


def make_meshes(settings: FsdpConfig, size: int, device: torch.device, parallel: ModelParallel = WHOLE) -> Meshes:
    """Return the meshes of `size` ranks. All ranks must call it.

    Dense modules are shared by replicas x shards x tensor ranks, and experts by replicas x shards x expert ranks. The
    last dimension has consecutive ranks, so that they are on one machine, whose links are the fastest.

    Raises:
        UserError: `replicas`, or one of the numbers of `parallel`, does not divide the number of ranks.
    """
    replicas = settings.replicas
    if replicas < 1 or size % replicas:
        raise UserError(
            f"trainer.fsdp.replicas={replicas} does not divide the {size} {'ranks' if size > 1 else 'rank'}; "
            f"use a divisor of {size}"
        )
    for key, number in (("tensor_parallel", parallel.tensor), ("expert_parallel", parallel.expert)):
        if (size // replicas) % number:
            raise UserError(
                f"trainer.{key}={number} does not divide the {size // replicas} ranks of one copy of the model; use a "
                f"divisor of {size // replicas}"
            )
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel.is_used:
        return Meshes(_mesh(settings, size, device))
    dense = _mesh(settings, size, device, "tensor", parallel.tensor)
    experts = _mesh(settings, size, device, "expert", parallel.expert)
    copies = ("shard",) if replicas == 1 else ("replicate", "shard")
    return Meshes(dense[copies], dense["tensor"], experts[copies], experts["expert"])


def _mesh(
    settings: FsdpConfig, size: int, device: torch.device, inner: str | None = None, width: int = 1
) -> DeviceMesh:
    """Return the mesh of all ranks, with a last dimension `inner` of `width` ranks if it is given."""
    replicas = settings.replicas
    sizes = {} if replicas == 1 else {"replicate": replicas}
    sizes |= {"shard": size // replicas // width}
    sizes |= {inner: width} if inner else {}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    groups = mesh.get_all_groups() if len(sizes) > 1 else []
    if inner:  # norms are summed over both dimensions at once; PyTorch warns without this group
        groups.append(mesh["shard", inner]._flatten().get_group())
    for group in groups:  # new groups have a timeout of half an hour
        _set_pg_timeout(timedelta(seconds=settings.timeout), group)
    return mesh
