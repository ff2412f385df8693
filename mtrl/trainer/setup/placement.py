"""The place of an engine's weights and cache: shared with the policy or a copy, on which device, and how large."""

from __future__ import annotations

import torch

from mtrl.config.derived import cache_budget, in_a_process, overlaps, serves
from mtrl.config.schema import Config
from mtrl.distributed.sharding import local_part, needs_sharding
from mtrl.distributed.world import World


def cache_bytes(device: torch.device, reserved: int) -> int | None:
    """Return the maximum number of bytes of the engine's cache on a GPU; None on other devices.

    Args:
        reserved: bytes that the trainer will allocate on this GPU.
    """
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return cache_budget(torch.cuda.mem_get_info(device)[0] + unused, reserved)


def bytes_to_come(module: torch.nn.Module) -> int:
    """Return the bytes of gradients and moments that the first update allocates for this rank's weights on a GPU."""
    trained = (value for value in map(local_part, module.parameters()) if value.requires_grad and value.is_cuda)
    return 3 * sum(value.nbytes for value in trained)


def has_copy(config: Config, world: World) -> bool:
    """Return whether the engine has its own copy of the weights: with servers, with a sharded policy, with adapters,
    which the engine does not support, with an engine in a separate process or in rollout workers, and if turns are
    sampled during updates."""
    sharded = needs_sharding(config.trainer.fsdp, world)
    elsewhere = serves(config) or in_a_process(config) or config.rollouts.workers > 0
    return elsewhere or sharded or overlaps(config) or config.model.lora_rank > 0


def sent_device(config: Config, device: torch.device) -> torch.device | None:
    """Return the device on which weights are gathered for the engine: the trainer's GPU if the engine copies from it;
    None: CPU memory, for shared memory, for rollout workers, and for servers, whose weights are kept for restarts.

    Args:
        device: device of the policy.
    """
    elsewhere = serves(config) or config.rollouts.workers > 0 or in_a_process(config)
    return None if elsewhere or device.type != "cuda" else device
