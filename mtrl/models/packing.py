"""Packs: sequences laid end to end in one row, each without the prefix that it shares with the sequence before it.

The positions describe the pack: they begin at 0 with a whole sequence, and at s > 0 with a sequence that continues the
first s tokens of the one before it (`mtrl.models.attention`). Prefix Grouper (2506.05433) and tree attention do the
same for one prompt; here any chain of prefixes is shared, such as a system message and the question of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_PREFIX = 32
"""Minimum number of tokens of a shared prefix. Every layer gathers the keys of a prefix for each sequence, so that a
shorter prefix saves little: on a CPU 10 % of the time with 32 tokens and 3 % with 16 (`benchmarks/RESULTS.md`)."""

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Row = tuple[Ids, Mask]
"""Token ids [L] of a sequence, and the mask [L] of its sampled tokens."""


def shared_prefix(before: Row, row: Row) -> int:
    """Return the number of tokens at the start of `row` that a pack takes from the sequence before it.

    All sampled tokens, and the token before the first of them, stay the sequence's own.
    """
    ids, mask = row
    width = min(len(before[0]), len(ids))
    different = np.flatnonzero(before[0][:width] != ids[:width])
    common = int(different[0]) if len(different) else width
    sampled = np.flatnonzero(mask)
    own = int(sampled[0]) if len(sampled) else len(ids)
    shared = min(common, own - 1)
    return shared if shared >= MIN_PREFIX else 0


def shared_prefixes(rows: Sequence[Row]) -> list[int]:
    """Return `shared_prefix` of each sequence after the one before it; 0 for the first."""
    return [0, *(shared_prefix(before, row) for before, row in pairwise(rows))]


def partition(units: Sequence[Sequence[Row]], max_tokens: int) -> list[list[int]]:
    """Assign units, each of one or more sequences, to packs of at most `max_tokens` stored tokens, or of a single
    larger unit. Units are in the order of their tokens, so that those with a common prefix follow each other.

    Returns:
        The indices of the units of each pack.
    """
    plans: list[list[int]] = []
    room, before = 0, None
    for index in sorted(range(len(units)), key=lambda index: units[index][0][0].tolist()):
        unit = units[index]
        whole = sum(len(ids) for ids, _ in unit) - sum(shared_prefixes(unit))
        size = whole - (shared_prefix(before, unit[0]) if before else 0)
        if not plans or size > room:
            plans.append([])
            room, size = max_tokens, whole
        plans[-1].append(index)
        room -= size
        before = unit[-1]
    return plans


def pack(rows: Sequence[Row], starts: Sequence[int]) -> tuple[Ids, Mask, Ids]:
    """Return ids, mask and positions, [1, L] each, of the sequences laid end to end.

    Args:
        starts: for each sequence, the number of tokens at its start that are left out (`shared_prefixes`).
    """
    cut = list(zip(rows, starts, strict=True))
    ids = np.concatenate([ids[start:] for (ids, _), start in cut])
    mask = np.concatenate([mask[start:] for (_, mask), start in cut])
    positions = np.concatenate([np.arange(start, len(ids)) for (ids, _), start in cut])
    return ids[None], mask[None], positions[None]
