"""Progress of a run, which a checkpoint stores, and comparison of the rows of a resumed run with those before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtrl.datasets import Splits


@dataclass
class RunProgress:
    """Progress of a run. With the weights, the optimiser, unused groups and random state, it is the state that a
    checkpoint stores."""

    step: int = 0
    rows_drawn: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    """`name` and `state` of the sampler of rows, at the time of `rows_drawn`."""
    silent_steps: int = 0
    """Number of consecutive steps without any advantage."""
    seconds: float = 0.0
    score: float | None = None
    """Held-out success rate of the last evaluation, if it was of the current weights."""
    kl_coefficient: float | None = None
    """Weight of the KL, which changes if `algorithm.kl_target` is set."""
    start: str = ""
    """Digest of the weights before training, if a resumed run needs them; else empty, as in earlier versions."""
    rows: dict[str, str] = field(default_factory=dict)
    """Digest of the rows of each split (see `digests`); empty in checkpoints of earlier versions."""


def digests(splits: Splits) -> dict[str, str]:
    """Return a digest of ids, prompts and truths for the training rows and for the held-out rows."""
    return {"training": _digest(splits.train), "held-out": _digest(splits.held_out)}


def _digest(rows: list[Any]) -> str:
    found = hashlib.sha256()
    for row in rows:
        parts = [row.get(name) for name in ("id", "prompt", "ground_truth")]
        found.update(json.dumps(parts, sort_keys=True, default=str).encode())
    return found.hexdigest()


def changed_rows(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return a warning for each split whose rows are others than before the run was resumed."""
    effects = {
        "training": "the sampler goes on in other rows",
        "held-out": "evaluations before and after differ in rows",
    }
    return [
        f"the {split} rows are others than before the run was resumed: {effects[split]}"
        for split, digest in before.items()
        if now.get(split) != digest
    ]
