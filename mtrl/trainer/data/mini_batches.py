"""Mini-batches: division of a step's samples into parts, one for each optimiser step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mtrl.config.schema import TrainerConfig
from mtrl.types import Sample


def mini_batches(samples: Sequence[Sample], config: TrainerConfig, seed: int, step: int) -> list[list[Sample]]:
    """Divide the samples into `mini_batches` parts of whole groups, in another random order in each of `update_epochs`
    passes. Return the parts of all passes."""
    if config.mini_batches == 1 and config.update_epochs == 1:
        return [list(samples)]
    groups = list(dict.fromkeys(sample.group_id for sample in samples))
    parts = []
    for epoch in range(config.update_epochs):
        random.Random(f"{seed}/{step}/{epoch}").shuffle(groups)
        for part in range(config.mini_batches):
            chosen = set(groups[part :: config.mini_batches])
            parts.append([sample for sample in samples if sample.group_id in chosen])
    return parts
