"""Reading of a rank's slices of a sharded module from the files of its weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from mtrl.models.stored_tensors import StoredTensor
from mtrl.models.weight_files import digests


def every_rank_has(stored: Iterable[StoredTensor]) -> bool:
    """Return on each rank whether all ranks can read the files of these tensors, which are the files of rank 0. A rank
    on another machine may have none under the same path, or those of another model. All ranks must call it."""
    found: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(found, digests(stored))
    return all(found[0].values()) and all(own == found[0] for own in found)


@torch.no_grad()
def read_slice(parameter: Tensor, stored: StoredTensor) -> None:
    """Fill this rank's part of a parameter from the files of the whole tensor, cast to the parameter's dtype. No rank
    communicates.

    Raises:
        UserError: a file cannot be read.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() == 0:  # the tensor has fewer rows than there are ranks
        return
    owned = [own_indices(parameter, dimension) for dimension in range(parameter.dim())]
    part = stored.read([slice(int(rows[0]), int(rows[-1]) + 1) for rows in owned])
    for dimension, rows in enumerate(owned):
        if len(rows) < part.shape[dimension]:  # they are not consecutive
            part = part.index_select(dimension, rows - rows[0])
    local.copy_(part)


def own_indices(parameter: Tensor, dimension: int) -> Tensor:
    """Return the indices, in ascending order, at which this rank's part of a parameter lies in the whole tensor, along
    one dimension. PyTorch divides the list of all indices like the parameter, so that every placement is covered."""
    size = parameter.shape[dimension]
    if not isinstance(parameter, DTensor):
        return torch.arange(size)
    mesh = parameter.device_mesh
    lengths = [1] * parameter.dim()
    lengths[dimension] = size
    indices = torch.arange(size, device=mesh.device_type).view(lengths)
    placements = [p if getattr(p, "dim", None) == dimension else Replicate() for p in parameter.placements]
    return distribute_tensor(indices, mesh, placements, src_data_rank=None).to_local().flatten().cpu()
