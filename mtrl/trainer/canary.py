"""A check, after every change of weights, that the engine's servers sample with the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from mtrl.engines.base import Generation, SamplingParams
from mtrl.errors import RunEndedError
from mtrl.trainer.data.batching import MicroBatch, micro_batches
from mtrl.trainer.work_thread import WorkThread
from mtrl.types import Sample

if TYPE_CHECKING:
    from mtrl.engines.server.engine import ServerEngine

TOKENS = 8
"""Number of tokens that each server samples for a check."""


class WrongWeightsError(RunEndedError):
    """A server samples with other weights than the trainer's."""


@dataclass
class Canary:
    """Has every server sample a few tokens after a fixed prompt, and compares their log-probs with the trainer's."""

    engine: ServerEngine
    logprobs: Callable[[Sequence[MicroBatch]], list[Tensor]]
    """Function that returns the trainer's log-probs, [N] for each micro-batch."""
    work_thread: WorkThread
    prompt: list[int]
    sampling: SamplingParams
    """Sampling parameters, with the temperature of training, at which the trainer computes log-probs."""
    tolerance: float
    """Largest allowed difference between the log-probs of a token, in nats."""
    name: str
    """Name of the engine."""

    async def check(self, version: int) -> dict[str, float]:
        """Return the mean and the largest difference over all servers, as metrics; empty if no server sampled a token.

        Raises:
            WrongWeightsError: a difference is larger than the tolerance, or a token has another version.
        """
        sampling = replace(self.sampling, max_generate_length=TOKENS, seed=version, stop=())
        probes = await self.engine.probe(self.prompt, sampling)
        for probe in probes:
            if other := [found for found, _ in probe.version_spans if found != version]:
                raise self._error(f"a server samples by version {other[0]} instead of {version}")
        samples = [self._sample(probe) for probe in probes if probe.token_ids]
        if not samples:
            return {}
        weights = [np.zeros(len(sample.token_ids)) for sample in samples]
        batches = micro_batches(samples, weights, max_tokens=2**14)
        found = await self.work_thread.do(self.logprobs, batches)
        gaps = [(mine.cpu() - batch.rollout_logprobs).abs() for mine, batch in zip(found, batches, strict=True)]
        largest = max(float(gap.max()) for gap in gaps)
        if not largest <= self.tolerance:  # this form also catches NaN
            raise self._error(
                f"log-probs of tokens that a server sampled by version {version} differ from the trainer's by "
                f"{largest:.3g}, more than generator.{self.name}.canary_tolerance={self.tolerance:g}"
            )
        mean = sum(float(gap.sum()) for gap in gaps) / sum(len(gap) for gap in gaps)
        return {"engine/canary/max": largest, "engine/canary/mean": mean}

    def _sample(self, probe: Generation) -> Sample:
        prompt_length, sampled = len(self.prompt), len(probe.token_ids)
        return Sample(
            token_ids=[*self.prompt, *probe.token_ids],
            loss_mask=[False] * prompt_length + [True] * sampled,
            logprobs=[0.0] * prompt_length + probe.logprobs,
            advantages=[0.0] * (prompt_length + sampled),
            versions=[-1] * prompt_length + [v for v, count in probe.version_spans for _ in range(count)],
            turns=[-1] * prompt_length + [0] * sampled,
        )

    def _error(self, what: str) -> WrongWeightsError:
        return WrongWeightsError(
            f"{what}; read the servers' log in engine/ of the run, try another generator.{self.name}.weight_sync, or "
            f"disable this check by generator.{self.name}.canary_tolerance=0"
        )
