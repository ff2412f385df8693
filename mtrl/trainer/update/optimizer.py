"""AdamW with warm-up, a learning-rate schedule and gradient-norm clipping, for plain and for sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrl.config.trainer_schema import OptimizerConfig
from mtrl.distributed.sharding import local_part, whole_tensor
from mtrl.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


def lr_scale(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the factor of `lr` at `step` (from 0): linear warm-up, then constant, linear or cosine decay to
    `min_lr_ratio`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay[config.schedule]


class Optimizer:
    """Updates the trainable parameters of a model.

    Under FSDP2 every rank updates its shards; all ranks must call `step` at the same time, since the norm is that of
    the whole gradient. The state can be read and restored as tensors by name, for checkpoints without pickle.
    """

    def __init__(self, model: Any, config: OptimizerConfig, total_steps: int):
        """A model that is to be sharded must be sharded before."""
        self.config, self.total_steps = config, total_steps
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._named.values())
        self._meshes: dict[Any, list[Tensor]] = {}
        """Parameters by device mesh, with None for plain ones, since torch's operations on lists do not accept a
        mixture."""
        for parameter in self.parameters:
            self._meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        self._adam = torch.optim.AdamW(
            [{"params": alike} for alike in self._meshes.values()],
            lr=config.lr,
            betas=tuple(config.betas),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=is_fused(self.parameters),
        )
        self._pinned: dict[tuple[Tensor, str], Tensor] = {}
        """With `offload`, the copies of moments in page-locked CPU memory, which are filled again in each step."""

    def step(self, step: int) -> tuple[float, float]:
        """Clip and apply the gradients of training step `step`. Return their norm before clipping and the learning
        rate.

        If the norm is not finite, the weights are not changed.
        """
        norm = clip_gradients(list(self._meshes.values()), self.config.max_grad_norm)
        lr = self.config.lr * lr_scale(self.config, step, self.total_steps)
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._load_moments()
            self._adam.step()
            self._offload_moments()
        self._adam.zero_grad(set_to_none=True)
        return norm, lr

    def state(self) -> dict[str, Tensor]:
        """Return `{"<parameter>.<step | exp_avg | exp_avg_sq>": tensor}` without copies; moments have the sharding of
        their parameters. The result is empty before the first step."""
        states = ((name, self._adam.state.get(parameter, {})) for name, parameter in self._named.items())
        return {f"{name}.{key}": value for name, values in states for key, value in values.items()}

    def allocate(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of `state` with these names, to be filled in place; tensors that do not exist yet are
        created with zeros.

        Raises:
            UserError: a name belongs to no trained parameter.
        """
        names = list(names)
        owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
        if unknown := [owner for owner in owners if owner not in self._named]:
            raise UserError(
                f"the optimiser's state has parameters that are not trained here ({', '.join(unknown[:2])}"
                f"{', …' if unknown[2:] else ''}); continue with the model and the settings that it was written with"
            )
        for parameter in (self._named[owner] for owner in owners):
            if not self._adam.state.get(parameter):
                self._adam.state[parameter] = _initial_state(parameter, is_fused(self.parameters))
        self._offload_moments()
        state = self.state()
        return {name: state[name] for name in names}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the `state` of another optimiser: whole tensors, or tensors with the sharding of the parameters.

        Raises:
            UserError: a name belongs to no trained parameter.
        """
        self._adam.state.clear()
        for name, target in self.allocate(tensors).items():
            target.copy_(_sharded_as(tensors[name], target))

    def _load_moments(self) -> None:
        """With `offload`, move the moments to the devices of their parameters."""
        if self.config.offload:
            for parameter, values in self._adam.state.items():
                values |= {key: values[key].to(parameter.device, non_blocking=True) for key in MOMENTS}

    def _offload_moments(self) -> None:
        """With `offload`, move the moments to CPU memory, where they stay between updates."""
        if not self.config.offload:
            return
        for parameter, values in self._adam.state.items():
            values |= {key: self._offloaded(parameter, key, values[key]) for key in MOMENTS}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # copies to page-locked memory do not block this thread

    def _offloaded(self, parameter: Tensor, key: str, moment: Tensor) -> Tensor:
        if moment.device.type == "cpu":
            return moment
        host = self._pinned.get((parameter, key))
        if host is None:
            host = self._pinned[parameter, key] = pinned(moment.to("cpu"))
        else:
            local_part(host).copy_(local_part(moment), non_blocking=True)
        return host


@torch.no_grad()
def clip_gradients(groups: list[list[Tensor]], limit: float) -> float:
    """Scale gradients so that their total norm is at most `limit`. Return the norm before.

    Args:
        groups: lists of parameters of one kind: all plain, or all DTensors of one mesh. The norms of sharded gradients
            are combined over ranks, on the CPU (gloo) if the gradients are offloaded.
    """
    found = [[p.grad for p in group if p.grad is not None] for group in groups]
    norms = [_whole(torch.nn.utils.get_total_norm(gradients)) for gradients in found if gradients]
    if not norms:
        return 0.0
    joined = torch.stack([norm.to(norms[0].device, norms[0].dtype) for norm in norms])
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(joined)
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)  # as `torch.nn.utils.clip_grads_with_norm_`
    for gradient in (gradient for gradients in found for gradient in gradients):
        part = local_part(gradient)  # PyTorch takes seconds to plan the operations of whole DTensors
        part.mul_(scale.to(part.device))
    return total.item()


def is_fused(parameters: list[Tensor]) -> bool | None:
    """Return the argument `fused` of AdamW: true if all parameters are on a GPU, else None, PyTorch's default."""
    return True if parameters and all(parameter.is_cuda for parameter in parameters) else None


def pinned(tensor: Any) -> Tensor:
    """Move the memory of a tensor, or of this rank's slice of a DTensor, to page-locked CPU memory, which a GPU copies
    several times as fast."""
    if not isinstance(tensor, DTensor):
        return tensor.pin_memory()
    tensor._local_tensor = tensor._local_tensor.pin_memory()  # `DTensor.from_local` would move it to the mesh's device
    return tensor


def _initial_state(parameter: Tensor, fused: bool | None) -> dict[str, Tensor]:
    """Return AdamW's state of a parameter before its first step. Fused, the number of steps is on the GPU."""
    moments = {key: torch.zeros_like(parameter, memory_format=torch.preserve_format) for key in MOMENTS}
    device = parameter.device if fused else torch.device("cpu")
    return {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}


def _whole(tensor: Any) -> Tensor:
    return whole_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def _sharded_as(value: Tensor, target: Any) -> Tensor:
    """Shard a whole tensor, which every rank has, like `target`; return it unchanged if it is already sharded or if
    `target` is plain."""
    if not hasattr(target, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
