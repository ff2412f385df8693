"""Assignment of GPUs to the servers of an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from mtrl.config.engine_schema import ServerConfig
from mtrl.errors import UserError


def server_devices(name: str, settings: ServerConfig, trainers: int) -> Sequence[int] | None:
    """Return the indices of the GPUs of all replicas, in order; None without a GPU, or for servers that run already.

    Args:
        name: name of the engine.
        trainers: number of GPUs of this machine that ranks train on, which are the first ones.

    Raises:
        UserError: there are not enough GPUs, or a configured index does not exist.
    """
    if settings.urls or not torch.cuda.is_available():
        return None
    found, needed = torch.cuda.device_count(), settings.replicas * settings.tensor_parallel_size
    if settings.devices is not None:
        if max(settings.devices) >= found:
            raise UserError(
                f"generator.{name}.devices={list(settings.devices)} names GPU {max(settings.devices)}, and this "
                f"machine shows {found}, from 0; name those"
            )
        return list(settings.devices)
    free = list(range(trainers) if settings.colocate else range(trainers, found))
    if len(free) < needed:
        raise UserError(
            f"generator.{name}.replicas={settings.replicas} x generator.{name}.tensor_parallel_size="
            f"{settings.tensor_parallel_size} need {needed} GPUs, and of this machine's {found} there are {len(free)} "
            + (
                "that ranks train on; lower one of them"
                if settings.colocate
                else f"beside the {trainers} that ranks train on; start fewer ranks, or share theirs by "
                f"generator.{name}.colocate=true"
            )
        )
    return free[:needed]


def training_gpus(world_size: int, device: torch.device) -> int:
    """Return the number of GPUs of this machine that ranks train on."""
    if device.type != "cuda":
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if world_size > 1 else (device.index or 0) + 1
