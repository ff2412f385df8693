"""Sharding of models over ranks with FSDP2, and conversion between whole and sharded weights.

Every rank holds a slice of each parameter. A layer's weights are gathered when its forward or backward needs them, and
its gradients are *summed* over the ranks (`fully_shard` would average them), because the token weights of the loss are
shares of the whole optimiser step. Forwards must go through the sharded root, so that its hooks fire; a sharded module
cannot be copied (`copy.deepcopy`), nor run by the local engine, which fuses weights. With model parallelism a layer is
first divided among some ranks (`mtrl.distributed.plans`), and each part is then sharded over the other ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from mtrl.distributed.meshes import WHOLE, ModelParallel, make_meshes
from mtrl.distributed.plans import divide
from mtrl.distributed.slices import every_rank_has, read_slice
from mtrl.distributed.ties import aliases_of, tie
from mtrl.errors import UserError
from mtrl.models.value_head import ValueModel
from mtrl.models.weight_files import file_tensors, forget_files

if TYPE_CHECKING:
    from mtrl.config.trainer_schema import FsdpConfig
    from mtrl.distributed.world import World


RECOMPILATIONS = 64
"""Number of variants of a compiled function (lengths, with and without gradients) before PyTorch compiles no more."""


def needs_sharding(settings: FsdpConfig, world: World) -> bool:
    """Return whether models must go through `shard`: with several ranks, or with mixed precision or CPU offload."""
    return world.size > 1 or settings.param_dtype is not None or settings.cpu_offload


def shard(
    module: nn.Module,
    settings: FsdpConfig,
    world: World,
    device: torch.device | None = None,
    parallel: ModelParallel = WHOLE,
) -> nn.Module:
    """Shard `module` in place: each decoder layer as a unit, then all remaining parameters with the root.

    All ranks must call it with the same weights, including randomly initialised ones. Weights are cast to `param_dtype`
    when they are gathered, while the slices keep their dtype. The head of a value model computes in its own dtype as
    well, since small differences between values matter; log-probs are computed in float32 from logits of any dtype. A
    single process without a process group gets one with an in-memory store.

    Args:
        device: device of the computation; None: the device of the module. Weights on another device are moved layer by
            layer.
        parallel: numbers of ranks that divide the modules before they are sharded over the others.

    Raises:
        UserError: `trainer.fsdp.replicas`, or a number of `parallel`, does not divide the number of ranks, or the
            model cannot be divided (`mtrl.distributed.plans.plans_of`).
    """
    device = device or next(module.parameters()).device
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    meshes = make_meshes(settings, world.size, device, parallel)
    shared: dict[str, Any] = {"mesh": meshes.data, "offload_policy": offload}
    reduced = getattr(torch, settings.reduce_dtype)
    mixed = MixedPrecisionPolicy(_dtype(settings.param_dtype), reduced)
    if parallel.is_used:  # outputs of divided modules are views of DTensors, and no code changes them in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for experts in divide(module, meshes, parallel) if parallel.is_used else ():
        fully_shard(
            experts,
            mesh=meshes.expert_data,
            offload_policy=offload,
            mp_policy=replace(mixed, cast_forward_inputs=False),  # as where the experts are sharded with their layer
            reshard_after_forward=settings.reshard_after_forward,
        )
    for layer in decoder_layers(module):
        fully_shard(layer, mp_policy=mixed, reshard_after_forward=settings.reshard_after_forward, **shared)
    for head in _precise_heads(module):
        fully_shard(head, mp_policy=MixedPrecisionPolicy(None, reduced), reshard_after_forward=False, **shared)
    # The root's weights, embedding and head, stay gathered between the end of the forward pass and the start of the
    # backward pass, which needs them first.
    fully_shard(module, mp_policy=mixed, reshard_after_forward=False, **shared)
    if world.size > 1:  # the gradients of one rank are sums already, and a factor would copy them once more
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo supports only a plain sum, as fast with NCCL
    reduce_unused(module, world.size)
    return module


@torch.no_grad()
def shard_from_leader(
    module: nn.Module,
    settings: FsdpConfig,
    world: World,
    device: torch.device | None = None,
    parallel: ModelParallel = WHOLE,
) -> nn.Module:
    """Shard a module whose weights only rank 0 has, and send every rank its slices, one tensor at a time. See `shard`.

    Parameters of rank 0 that are stored in files (`mtrl.models.weight_files`) are not sent: every rank reads its slices
    of them. Where a rank does not have these files, rank 0 reads and sends one tensor at a time.

    Args:
        module: rank 0: the module with weights, or with weights in files. Other ranks: a module of the same structure,
            whose parameters and buffers, on the meta device or not, are replaced.

    Raises:
        UserError: as for `shard`, or a file of the weights cannot be read.
    """
    leader = world.rank == 0
    whole = {name: value.detach() for name, value in module.named_parameters()} if leader else {}
    stored = file_tensors(module) if leader else {}
    described: list[Any] = [{name: value.dtype for name, value in whole.items()}, dict(module.named_buffers()), stored]
    dist.broadcast_object_list(described, src=0)  # buffers are small, and a checkpoint does not hold all of them
    dtypes, buffers, stored = described
    in_slices = bool(stored) and every_rank_has(stored.values())
    # A model is divided on the meta device by the leader too, since its slices would all be moved to the GPU at once.
    is_empty = not leader or parallel.is_used or bool(stored)
    if is_empty:
        aliases = aliases_of(module)
        device = device or torch.device("cpu")
        module.to("meta")
        for name, dtype in dtypes.items():
            module.get_parameter(name).data = module.get_parameter(name).data.to(dtype)
        _set_buffers(module, buffers)
        tie(module, aliases)
    shard(module, settings, world, device, parallel)
    if is_empty:
        aliases = aliases_of(module)
        buffers = dict(module.named_buffers())
        module.to_empty(device="cpu" if settings.cpu_offload else device)
        _set_buffers(module, buffers)
        tie(module, aliases)
    for name, value in module.named_parameters():
        if name in stored and in_slices:
            read_slice(value, stored[name])
            continue
        sent = whole.pop(name, None)
        _receive(value, stored[name].read() if leader and name in stored else sent, parallel.is_used)
    forget_files(module)
    return module


def _set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = value


def reduce_unused(module: nn.Module, ranks: int) -> None:
    """Sum the gradients of parameters that only some ranks used. Ranks process different tokens, and an expert that one
    rank did not use must not desynchronise them.

    Raises:
        UserError: PyTorch is older than 2.13, which brought this, and the experts of the model are separate modules.
    """
    if isinstance(module, FSDPModule) and hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
    elif ranks > 1 and any(
        isinstance(part, nn.ModuleList) for layer in decoder_layers(module) for part in layer.modules()
    ):
        raise UserError(
            f"torch {torch.__version__} cannot shard the separate experts of {type(module).__name__} over {ranks} "
            "ranks; install torch 2.13 or later"
        )


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the `ModuleList` with the most parameters. A list inside another list's blocks, such as the
    experts of a layer, does not count. The result is empty if the model has no list with parameters."""
    lists = sorted(_outermost_lists(module), key=_weight)
    return list(lists[-1]) if lists and _weight(lists[-1]) else []


def compile_layers(module: nn.Module, backend: str = "inductor") -> None:
    """Apply `torch.compile` to the forward pass of each decoder layer in place; the names of parameters stay. Call it
    after `checkpoint_gradients` and before `shard`. A compiled module must not be copied: the copy would call the
    layers of the original.

    The layers recompute what they did by compiled code: a checkpoint inside of it, as later versions of Transformers
    have one, cannot be split at attention, which is not compiled, and PyTorch would leave the whole layer uncompiled.

    Raises:
        UserError: the model has no list of layers.
    """
    layers: list[Any] = decoder_layers(module)
    if not layers:
        raise UserError(
            f"trainer.compile=true: {type(module).__name__} has no list of layers; use trainer.compile=false"
        )
    # A decorator of Transformers is one function for PyTorch, which counts each use of it as a recompilation.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILATIONS)
    for layer in layers:
        compiled = torch.compile(layer.forward, backend=backend, dynamic=True)
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            layer.gradient_checkpointing = False
            layer.forward = partial(_recomputed, layer._gradient_checkpointing_func, compiled)
        else:
            layer.forward = compiled


def _recomputed(checkpoint: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the output of a compiled layer, whose activations the backward pass computes again."""
    if not torch.is_grad_enabled():
        return compiled(*args, **kwargs)
    return checkpoint(partial(compiled, **kwargs), *args)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `shard` was called on this module."""
    return isinstance(module, FSDPModule)


def plain_class(module: nn.Module) -> Any:
    """Return the class of a module before it was sharded."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def compute_device(module: nn.Module) -> torch.device:
    """Return the device of a module's inputs, which differs from the device of offloaded weights."""
    parameter = next(module.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != parameter.device.type:
        return torch.device(parameter.device_mesh.device_type, torch.cuda.current_device())
    return parameter.device


def reshard(module: nn.Module) -> None:
    """Free the weights that forwards without a backward left gathered; a module that is not sharded has none."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def named_tensors(module: nn.Module, trainable_only: bool = False) -> dict[str, Tensor]:
    """Return the tensors of `state_dict` without copies: tied tensors once, by their first name; DTensors for sharded
    parameters.

    Args:
        trainable_only: leave out buffers and parameters without gradient, so that only the adapters of a model with
            LoRA remain.
    """
    state = module.state_dict()  # this also frees gathered weights
    if trainable_only:
        return {name: state[name] for name, p in module.named_parameters() if p.requires_grad}
    aliases = aliases_of(module)
    return {name: value for name, value in state.items() if name not in aliases}


@torch.no_grad()
def full_state(
    module: nn.Module,
    trainable_only: bool = False,
    dtype: torch.dtype | None = None,
    names: Collection[str] | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor] | None:
    """Return whole copies of `named_tensors`, on rank 0; None on the other ranks.

    All ranks must call it. They gather one tensor at a time, so that the peak of memory is small. For a module that is
    not sharded, each process returns its own copy and communicates with no other rank.

    Args:
        dtype: dtype to which larger parameters are rounded, before they are gathered; None: they keep theirs. Buffers
            keep theirs.
        names: names of the tensors to return; None: all.
        device: device of the copies; None: CPU memory.
    """
    leader = not is_sharded(module) or dist.get_rank() == 0
    state: dict[str, Tensor] = {}
    tensors = named_tensors(module, trainable_only)
    dtypes = _rounded(module, tensors, dtype)
    for name in tensors if names is None else names:
        value = tensors[name]
        whole = _gathered(value.to(dtypes[name]))
        if leader:
            is_own = whole.untyped_storage().data_ptr() == local_part(value).untyped_storage().data_ptr()
            state[name] = whole.to(device or "cpu", copy=is_own)
        del whole  # else it would exist while the next tensor is gathered
    return state if leader else None


def full_layout(module: nn.Module, trainable_only: bool = False, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the result of `full_state` with tensors on the meta device, which have shapes and dtypes alone. No rank
    communicates."""
    tensors = named_tensors(module, trainable_only)
    dtypes = _rounded(module, tensors, dtype)
    return {name: torch.empty(value.shape, dtype=dtypes[name], device="meta") for name, value in tensors.items()}


def _rounded(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtypes in which `full_state` gathers these tensors: `dtype` for parameters that are larger."""
    parameters = {name for name, _ in module.named_parameters()}
    return {
        name: dtype if dtype and name in parameters and dtype.itemsize < value.dtype.itemsize else value.dtype
        for name, value in tensors.items()
    }


@torch.no_grad()
def load_state(module: nn.Module, state: Mapping[str, Tensor], trainable_only: bool = False) -> None:
    """Copy weights in place; every rank passes its own `state`, of whole tensors or of DTensors with the same sharding.

    Raises:
        ValueError: names or shapes differ from the module's; no weight was changed.
    """
    own = named_tensors(module, trainable_only)
    given = _renamed(module, state)
    if problem := _misfit(own, given):
        raise ValueError(problem)
    for name, value in own.items():
        local_part(value).copy_(local_part(_sharded_like(value, given[name])))


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


def _renamed(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with tied tensors under their first names."""
    aliases = aliases_of(module)
    return {aliases.get(name, name): value for name, value in state.items()}


def _misfit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """Return an error message if the names or shapes of the given tensors differ from the module's, else an empty
    text."""
    missing, unexpected = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unexpected:
        return f"weights do not fit the model: missing {missing}, unexpected {unexpected}"
    shapes = [(name, list(given[name].shape), list(value.shape)) for name, value in own.items()]
    wrong = [f"{name} is {found}, not {wanted}" for name, found, wanted in shapes if found != wanted]
    return f"weights do not fit the model: {', '.join(wrong)}" if wrong else ""


def _gathered(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    moved: Any = value.to(value.device_mesh.device_type)  # gathering of offloaded slices is fast on the GPU
    return whole_tensor(moved)


def whole_tensor(value: DTensor) -> Tensor:
    """Return the whole tensor, on every rank of its mesh. All of them must call it."""
    placements = list(value.placements)
    for dimension in range(len(placements) - 1):  # one at a time: PyTorch warns of several
        placements[dimension] = Replicate()
        value = value.redistribute(placements=placements)
    return value.full_tensor()


def _receive(value: Tensor, whole: Tensor | None, is_divided: bool) -> None:
    """Fill `value` from the whole tensor of rank 0. If the model is divided, rank 0 may not belong to the mesh of the
    tensor, so every rank receives the whole tensor and keeps its slice."""
    if not isinstance(value, DTensor):  # a buffer, which is whole on every rank
        if whole is not None:
            value.copy_(whole)
        dist.broadcast(value, src=0)
        return
    buffer = torch.empty(value.shape, dtype=value.dtype, device=value.device_mesh.device_type)
    if whole is not None:
        buffer.copy_(whole)
    if is_divided:
        dist.broadcast(buffer, src=0)
    source = None if is_divided else 0
    sharded = distribute_tensor(buffer, value.device_mesh, value.placements, src_data_rank=source)
    value.to_local().copy_(sharded.to_local())


def _sharded_like(value: Tensor, given: Tensor) -> Tensor:
    if not isinstance(value, DTensor) or isinstance(given, DTensor):
        return given
    whole = given.to(value.device_mesh.device_type)
    return distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)


def local_part(value: Any) -> Tensor:
    """Return this rank's slice of a DTensor, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value
