"""The groups of ranks that share sequences, `trainer.sequence_parallel` consecutive ranks each."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from mtrl.config.schema import Config
from mtrl.distributed.world import World
from mtrl.errors import UserError
from mtrl.models.sequence_parallel import SequenceGroup
from mtrl.trainer.loading import load_shape


def check_heads(config: Config) -> None:
    """Check that the attention heads of a pretrained policy can be divided among the ranks of a group, before a warm
    start takes minutes. The heads of the tiny policy are in the configuration, and were checked there.

    Raises:
        UserError: they cannot be divided.
    """
    size, path = config.trainer.sequence_parallel, config.model.path
    if size == 1 or config.model.name == "tiny" or path is None:
        return
    heads = load_shape(config, path)[0].get_text_config().num_attention_heads
    if heads % size:
        raise UserError(
            f"trainer.sequence_parallel={size} does not divide the {heads} attention heads of model.path={path}; use a "
            f"divisor of {heads}"
        )


def sequence_group(config: Config, world: World) -> SequenceGroup | None:
    """Return the group of this rank; None if each rank computes whole sequences. All ranks must call it.

    The ranks of a group follow each other, so that they are on one machine, whose links are the fastest.
    """
    size = config.trainer.sequence_parallel
    if size == 1:
        return None
    limit = timedelta(seconds=config.trainer.fsdp.timeout)
    groups = [
        dist.new_group([*range(first, first + size)], timeout=limit)  # every rank takes part in making every group
        for first in range(0, world.size, size)
    ]
    return SequenceGroup(groups[world.rank // size])
