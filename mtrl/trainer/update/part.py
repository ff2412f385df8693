"""The part of a micro-batch that a rank computes: all of it, or under sequence parallelism a part of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl.models.attention import takes_boundaries
from mtrl.models.sequence_parallel import HeadExchange, SequenceGroup
from mtrl.trainer.data.batching import MicroBatch


@dataclass(frozen=True)
class WholeBatch:
    """A micro-batch of N sampled tokens that this rank computes alone."""

    mask: Tensor
    """[B, l] bool mask of the computed positions that predict a sampled token."""
    inputs: dict[str, Any]
    """Inputs of the model for the l computed positions of each row."""

    def own(self, values: Tensor) -> Tensor:
        """Return the rows of `values` [N, ...] for the sampled tokens of `mask`."""
        return values

    def join(self, values: Tensor) -> Tensor:
        """Return the values of all sampled tokens, [N, ...], from those of `mask`."""
        return values


@dataclass(frozen=True)
class BatchPart(WholeBatch):
    """A part of each row of a micro-batch, of which the other ranks of a group compute the other parts."""

    chosen: Tensor
    """[N] bool mask of the sampled tokens of this part."""
    group: SequenceGroup

    def own(self, values: Tensor) -> Tensor:
        return values[self.chosen]

    def join(self, values: Tensor) -> Tensor:
        return self.group.join(values, self.chosen)


def part_of(batch: MicroBatch, model: Any, group: SequenceGroup | None) -> WholeBatch:
    """Return the part of a micro-batch that this rank computes by `model`.

    Args:
        group: the ranks that share the micro-batch; None: this rank computes it alone.
    """
    if group is not None:
        return _split(batch, group)
    return WholeBatch(batch.action_mask, batch.flash_inputs if takes_boundaries(model) else dict(batch.inputs))


def _split(batch: MicroBatch, group: SequenceGroup) -> BatchPart:
    """Return this rank's part. Rows are padded to a multiple of the number of parts.

    Tokens were shifted against their targets before (`MicroBatch.action_mask`), so that the last position of a part
    predicts the first token of the next part.
    """
    ids = batch.inputs["input_ids"]
    rows, width = ids.shape
    positions = batch.inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(width, device=ids.device).expand(rows, width)
    padding = -width % group.size
    # No token attends to the padding after it. Its positions begin at 0, since later positions may not exist.
    positions = torch.cat([positions, torch.arange(padding, device=ids.device).expand(rows, padding)], 1)
    length = (width + padding) // group.size
    part = slice(group.rank * length, (group.rank + 1) * length)
    columns = batch.action_mask.nonzero()[:, 1]
    return BatchPart(
        mask=F.pad(batch.action_mask, (0, padding))[:, part],
        inputs={
            "input_ids": F.pad(ids, (0, padding))[:, part],
            "position_ids": positions[:, part],
            "head_exchange": HeadExchange(group, positions),
        },
        chosen=(columns >= part.start) & (columns < part.stop),
        group=group,
    )
