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

MIN_PREFIX = 64
"""Minimum number of tokens of a shared prefix. Below it, attention to keys that are gathered from two places costs more
than the tokens."""

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


def shared_prefix(before: Ids, ids: Ids, mask: Mask) -> int:
    """Return the number of tokens at the start of a sequence that a pack takes from the sequence before it.

    All sampled tokens, and the token before the first of them, stay the sequence's own.

    Args:
        before: [K] token ids of the sequence before it.
        ids: [L] token ids.
        mask: [L] mask of the sampled tokens.
    """
    width = min(len(before), len(ids))
    different = np.flatnonzero(before[:width] != ids[:width])
    common = int(different[0]) if len(different) else width
    sampled = np.flatnonzero(mask)
    own = int(sampled[0]) if len(sampled) else len(ids)
    shared = min(common, own - 1)
    return shared if shared >= MIN_PREFIX else 0


def pack(ids: Sequence[Ids], masks: Sequence[Mask], share: bool) -> tuple[Ids, Mask, Ids]:
    """Return ids, mask and positions, [1, L] each, of the sequences laid end to end.

    Args:
        share: whether a sequence is stored without the prefix that it shares with the one before it.
    """
    starts = [0] * len(ids)
    if share:
        starts[1:] = [shared_prefix(a, b, mask) for (a, b), mask in zip(pairwise(ids), masks[1:], strict=True)]
    tokens = np.concatenate([row[start:] for row, start in zip(ids, starts, strict=True)])
    mask = np.concatenate([row[start:] for row, start in zip(masks, starts, strict=True)])
    positions = np.concatenate([np.arange(start, len(row)) for row, start in zip(ids, starts, strict=True)])
    return tokens[None], mask[None], positions[None]
