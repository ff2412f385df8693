"""Models sharded over ranks with FSDP2, and whole weights into and out of them.

Every rank holds a slice of each parameter. A layer's weights are gathered when its forward or backward needs them, and
its gradients are *summed* over the ranks (`fully_shard` would average them), for the weights of a loss are shares of
the whole optimiser step. Forwards must go through the sharded root, so that its hooks fire; a sharded module cannot be
copied (`copy.deepcopy`), nor run by the local engine, which fuses weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mtrl.errors import UserError
from mtrl.models.value_head import ValueModel

if TYPE_CHECKING:
    from mtrl.config.schema import FsdpConfig
    from mtrl.distributed.world import World


def needs_sharding(settings: FsdpConfig, world: World) -> bool:
    """Whether models must go through `shard`: there are several ranks, or one that wants mixed precision or offload."""
    return world.size > 1 or settings.param_dtype is not None or settings.cpu_offload


def shard(module: nn.Module, settings: FsdpConfig, world: World, device: torch.device | None = None) -> nn.Module:
    """Shard `module` in place: each decoder layer by itself, then all that is left with the root.

    All ranks must call it with the same weights; what is random must be the same too. Weights are cast to `param_dtype`
    where they are gathered, while the slices keep their own. The head of a value model keeps it in the computation as
    well, since small differences are what values are about; log-probs are computed in float32 from whatever the logits
    are in. One process without a process group gets one of its own in memory.

    Args:
        device: where it computes; None: where it is. Weights that are not there yet move layer by layer.

    Raises:
        UserError: `trainer.fsdp.replicas` does not divide the ranks.
    """
    device = device or next(module.parameters()).device
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    shared: dict[str, Any] = {"mesh": make_mesh(settings, world.size, device), "offload_policy": offload}
    reduced = getattr(torch, settings.reduce_dtype)
    mixed = MixedPrecisionPolicy(_dtype(settings.param_dtype), reduced)
    for layer in decoder_layers(module):
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward, **shared)
    for head in _precise_heads(module):
        fully_shard(head, mp_policy=MixedPrecisionPolicy(None, reduced), reshard_after_forward=False, **shared)
    # The root's weights, embedding and head, stay gathered from the end of the forward pass to the start of the
    # backward pass, which needs them first.
    fully_shard(module, mp_policy=mixed, reshard_after_forward=False, **shared)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # a plain sum: gloo has no other, and NCCL is as fast
    # Ranks see different tokens: an expert that one of them did not use must not desynchronise them.
    module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    return module


def make_mesh(settings: FsdpConfig, size: int, device: torch.device) -> DeviceMesh:
    """The ranks in a row, or (`replicas` > 1, HSDP) as [replicas, size / replicas].

    Raises:
        UserError: `replicas` does not divide `size`.
    """
    replicas = settings.replicas
    if replicas < 1 or size % replicas:
        raise UserError(
            f"trainer.fsdp.replicas={replicas} does not divide the {size} {'ranks' if size > 1 else 'rank'}; "
            f"use a divisor of {size}"
        )
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if replicas == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # new ones wait for half an hour
        _set_pg_timeout(timedelta(seconds=settings.timeout), group)
    return mesh


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The blocks that hold most of a model: those of the list with the most parameters. A `ModuleList` inside of
    another's blocks does not count, as of a layer's experts. Empty where there is none."""
    lists = sorted(_outermost_lists(module), key=_weight)
    return list(lists[-1]) if lists and _weight(lists[-1]) else []


def compile_layers(module: nn.Module, backend: str = "inductor") -> None:
    """`torch.compile` each decoder layer in place; names of parameters stay. To be called before `shard`.

    Raises:
        UserError: the model has no list of layers.
    """
    layers = decoder_layers(module)
    if not layers:
        raise UserError(
            f"trainer.compile=true: {type(module).__name__} has no list of layers; use trainer.compile=false"
        )
    for layer in layers:
        layer.compile(backend=backend)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` was called on this module."""
    return isinstance(module, FSDPModule)


def plain_class(module: nn.Module) -> Any:
    """The class of a module before it was sharded."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def compute_device(module: nn.Module) -> torch.device:
    """Where a module takes its inputs, which is not where offloaded weights lie."""
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())
    return parameter.device


def reshard(module: nn.Module) -> None:
    """Free what forwards without a backward left gathered; nothing to do for a plain module."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def named_tensors(module: nn.Module, trainable_only: bool = False) -> dict[str, Tensor]:
    """The tensors of `state_dict`, without copies: tied ones once, by their first name; DTensors where sharded.

    Args:
        trainable_only: leave out buffers and what has no gradient: the adapters of a model with LoRA.
    """
    state = module.state_dict()  # which frees what is gathered
    if trainable_only:
        return {name: state[name] for name, p in module.named_parameters() if p.requires_grad}
    aliases = _aliases(module)
    return {name: value for name, value in state.items() if name not in aliases}


@torch.no_grad()
def full_state(module: nn.Module, trainable_only: bool = False) -> dict[str, Tensor] | None:
    """Whole copies of `named_tensors` in the memory of the CPU, on rank 0; None on the others.

    All ranks must call it. They gather one tensor at a time, so that the peak is small. A module that is not sharded is
    this process's own: no other rank is asked.
    """
    leader = not is_sharded(module) or dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    for name, value in named_tensors(module, trainable_only).items():
        whole = _gathered(value)
        if leader:
            state[name] = whole.to("cpu", copy=True)
    return state if leader else None


@torch.no_grad()
def load_full_state(module: nn.Module, state: Mapping[str, Tensor] | None, trainable_only: bool = False) -> None:
    """Put whole weights, those of `full_state`, in place; only rank 0's `state` is read.

    All ranks must call it, unless the module is not sharded.

    Raises:
        ValueError: names or shapes are not the module's; on every rank, and nothing was changed.
    """
    if not is_sharded(module):
        return load_state(module, state or {}, trainable_only)
    own, leader = named_tensors(module, trainable_only), dist.get_rank() == 0
    given = _renamed(module, state or {}) if leader else {}
    problem = [_misfit(own, given) if leader else ""]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise ValueError(problem[0])
    for name, value in own.items():
        _receive(value, given.get(name))


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Tensor], trainable_only: bool = False) -> None:
    """Copy weights in place; every rank gives its own, DTensors sharded alike or whole tensors.

    Raises:
        ValueError: names or shapes are not the module's; nothing was changed.
    """
    own = named_tensors(module, trainable_only)
    given = _renamed(module, state)
    if problem := _misfit(own, given):
        raise ValueError(problem)
    for name, value in own.items():
        _local(value).copy_(_local(_sharded_like(value, given[name])))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _precise_heads(module: nn.Module) -> list[nn.Module]:
    return [module.head] if isinstance(module, ValueModel) else []


def _aliases(module: nn.Module) -> dict[str, str]:
    """Further names of tied parameters: the first name of each."""
    first: dict[nn.Parameter, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if first.setdefault(parameter, name) != name}


def _renamed(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with tied tensors by their first names."""
    aliases = _aliases(module)
    return {aliases.get(name, name): value for name, value in state.items()}


def _misfit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Why the tensors that were given are not the module's; nothing where they are."""
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unexpected:
        return f"weights do not fit the model: missing {missing}, unexpected {unexpected}"
    shapes = [(name, list(given[name].shape), list(value.shape)) for name, value in own.items()]
    wrong = [f"{name} is {found}, not {wanted}" for name, found, wanted in shapes if found != wanted]
    return f"weights do not fit the model: {', '.join(wrong)}" if wrong else ""


def _gathered(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    moved: Any = value.to(value.device_mesh.device_type)  # offloaded slices go where gathering is fast
    return moved.full_tensor()


def _receive(value: Tensor, whole: Tensor | None) -> None:
    """Fill `value` from the whole tensor of rank 0."""
    if not isinstance(value, DTensor):  # a buffer, which every rank has whole
        if whole is not None:
            value.copy_(whole)
        dist.broadcast(value, src=0)
        return
    buffer = torch.empty(value.shape, dtype=value.dtype, device=value.device_mesh.device_type)
    if whole is not None:
        buffer.copy_(whole)
    value.to_local().copy_(distribute_tensor(buffer, value.device_mesh, value.placements).to_local())


def _sharded_like(value: Tensor, given: Tensor) -> Tensor:
    if not isinstance(value, DTensor) or isinstance(given, DTensor):
        return given
    whole = given.to(value.device_mesh.device_type)
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)


def _local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
