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
    shared = min(_common(before, row), _first_own(row) - 1)
    return shared if shared >= MIN_PREFIX else 0


def shared_prefixes(rows: Sequence[Row]) -> list[int]:
    """Return `shared_prefix` of each sequence after the one before it; 0 for the first."""
    return [0, *(shared_prefix(before, row) for before, row in pairwise(rows))]


def _common(one: Row, other: Row) -> int:
    """Return the number of equal tokens at the starts of two sequences."""
    width = min(len(one[0]), len(other[0]))
    different = np.flatnonzero(one[0][:width] != other[0][:width])
    return int(different[0]) if len(different) else width


def _first_own(row: Row) -> int:
    """Return the index of the first sampled token, or the length of a sequence without sampled tokens."""
    sampled = np.flatnonzero(row[1])
    return int(sampled[0]) if len(sampled) else len(row[0])


def prefix_order(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the sequences in an order in which `shared_prefixes` are as long as possible in all.

    The order is that of the tokens, which is a depth-first walk through the tree of prefixes, but for one thing: among
    the branches that follow a prefix, one in which tokens of the prefix were sampled is the first, since it shares the
    tokens before these only. Thus the sample of a turn comes before that of a later turn of the same trajectory, whose
    prompt holds what was sampled in the earlier one.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index][0].tolist())
    most = [_first_own(row) - 1 for row in rows]
    open_nodes: list[tuple[int, list[list[int]]]] = [(0, [])]
    """Number of tokens, and finished branches, of each prefix that the current sequence continues."""
    branch = order[:1]
    for index, after in pairwise([*order, None]):
        common = 0 if after is None else _common(rows[index], rows[after])
        while open_nodes[-1][0] > common:
            length, branches = open_nodes.pop()
            branch = _joined([*branches, branch], length, most)
        if open_nodes[-1][0] < common:
            open_nodes.append((common, []))
        open_nodes[-1][1].append(branch)
        branch = [after]
    return [index for branch in open_nodes[0][1] for index in branch]


def _joined(branches: list[list[int]], length: int, most: Sequence[int]) -> list[int]:
    """Return the branches of a prefix of `length` tokens one after another. The first branch is the one whose first
    sequence can share the fewest tokens of the prefix, by the most tokens that each sequence can share."""
    branches.sort(key=lambda branch: min(most[branch[0]], length))
    return [index for branch in branches for index in branch]


def partition(units: Sequence[Sequence[Row]], max_tokens: int) -> list[list[int]]:
    """Assign units, each of one or more sequences, to packs of at most `max_tokens` stored tokens, or of a single
    larger unit. Units are in the order of `prefix_order`, so that those with a common prefix follow each other.

    Returns:
        The indices of the units of each pack.
    """
    plans: list[list[int]] = []
    room, before = 0, None
    for index in prefix_order([unit[0] for unit in units]):
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
