"""Distribution of micro-batches to ranks, so that no rank waits long for another."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.flops import ModelFlops


def cost(batch: MicroBatch, model: ModelFlops) -> float:
    """Return the FLOPs of a forward and a backward pass over a micro-batch, padding included."""
    if batch.position_ids is None:
        rows, width = batch.token_ids.shape
        return model.training([width] * rows, len(batch.weights))
    starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
    ends = [*starts[1:], batch.token_ids.shape[1]]
    return model.training([end - start for start, end in zip(starts, ends, strict=True)], len(batch.weights))


def balance(batches: Sequence[MicroBatch], ranks: int, model: ModelFlops) -> list[list[MicroBatch]]:
    """Return the micro-batches of each rank: the same number for every rank, with similar costs in the same round.

    Ranks of a sharded model synchronise at every layer, so a round takes as long as its costliest micro-batch.
    Therefore micro-batches that are adjacent in the order of cost share a round. Ranks without a micro-batch in the
    last round get a filler.
    """
    if ranks == 1:
        return [list(batches)]
    ordered = sorted(batches, key=lambda batch: -cost(batch, model))
    assignments: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    assigned_cost = [0.0] * ranks
    for start in range(0, len(ordered), ranks):
        round_batches = ordered[start : start + ranks]
        padded_round = [*round_batches, *[round_batches[-1].filler()] * (ranks - len(round_batches))]
        # The costliest micro-batch of a round goes to the rank with the lowest cost so far.
        for rank, batch in zip(sorted(range(ranks), key=assigned_cost.__getitem__), padded_round, strict=True):
            assignments[rank].append(batch)
            assigned_cost[rank] += cost(batch, model)
    return assignments
