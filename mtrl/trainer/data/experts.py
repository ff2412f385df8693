"""The recorded experts of samples in a micro-batch (`algorithm.router_replay`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mtrl.models.packing import Row
from mtrl.types import Sample
from mtrl.utils.expert_ids import ExpertIds


def experts_in(samples: Sequence[Sample], shape: tuple[int, ...], starts: Sequence[int]) -> ExpertIds | None:
    """Return the experts [B, L, layers, k] of samples in a grid of tokens; -1 where they are unknown, None if no sample
    has any.

    Args:
        shape: number of rows and columns of the grid: a row for each sample, or one row for all of them.
        starts: for each sample, the number of tokens at its start that the grid leaves out.
    """
    known = [sample.experts for sample in samples if sample.experts is not None]
    if not known:
        return None
    grid = np.full((*shape, *known[0].shape[1:]), -1, np.result_type(*known))
    begin = 0
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        length = len(sample.token_ids) - start
        place = grid[row, :length] if len(grid) > 1 else grid[0, begin : begin + length]
        if sample.experts is not None:
            place[:] = sample.experts[start:]
        begin += length
    return grid


def compared_rows(samples: Sequence[Sample], rows: Sequence[Row]) -> list[Row]:
    """Return the rows of samples with other ids, which are equal where both the tokens and the experts that compute
    them are equal (up to collisions of 64 bits). A pack computes a shared prefix once, so it may share no token that
    went to different experts."""
    return [(_compared(ids, sample.experts), mask) for sample, (ids, mask) in zip(samples, rows, strict=True)]


def _compared(ids: NDArray[np.int64], experts: ExpertIds | None) -> NDArray[np.int64]:
    if experts is None:
        return ids
    columns = experts[1:].reshape(len(ids) - 1, -1).T  # row i + 1 holds the experts of token i
    factors = np.random.default_rng(0).integers(1, 2**63, len(columns), dtype=np.int64) | 1
    compared = ids.copy()
    for column, factor in zip(columns, factors, strict=True):
        compared[:-1] += column * factor  # wraps around
    return compared
