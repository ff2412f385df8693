"""Numbers per sampled token from a forward pass of a model over samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from mtrl.algorithms.batch import Floats
from mtrl.trainer.data.batching import MicroBatch, micro_batches
from mtrl.trainer.update.learner import Learners
from mtrl.types import Sample


def token_values(
    samples: Sequence[Sample],
    forward: Callable[[Sequence[MicroBatch]], list[Tensor]],
    learners: Learners,
    max_tokens: int,
) -> list[Floats]:
    """Return, for each sample, one number per sampled token, float64.

    Args:
        forward: method of `learners` that returns the numbers, [N] for each micro-batch, on the CPU.
        max_tokens: maximum number of tokens of a micro-batch, padding included.
    """
    weights = [np.zeros(len(sample.token_ids)) for sample in samples]
    batches = micro_batches(samples, weights, max_tokens, layout=learners.layout, ranks=learners.ranks)
    found: dict[int, Floats] = {}
    for batch, values in zip(batches, forward(batches), strict=True):
        parts = values.double().split([samples[row].action_tokens for row in batch.rows])
        found.update(zip(batch.rows, (part.numpy() for part in parts), strict=True))
    return [found[row] for row in range(len(samples))]
