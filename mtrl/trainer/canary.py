"""A check, after every change of weights, that the engine's servers sample with the trainer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mtrl.engines.base import SamplingParams
from mtrl.errors import RunEndedError
from mtrl.trainer.data.batching import MicroBatch, micro_batches
from mtrl.trainer.work_thread import WorkThread
from mtrl.types import Generation, Sample

if TYPE_CHECKING:
    from mtrl.engines.server.engine import ServerEngine
    from mtrl.rollout.served_workers import ServedWorkers

TOKENS = 64
"""Smallest number of tokens of each server that a check compares. In half precision the difference of one token has a
long tail in healthy runs; its mean over this many tokens has not."""
MAX_DRAWS = 8
"""Maximum number of turns that each server samples for a check, if turns end early."""


class WrongWeightsError(RunEndedError):
    """A server samples with other weights than the trainer's."""


@dataclass
class Canary:
    """Has every server sample some tokens after a fixed prompt, and compares their log-probs with the trainer's."""

    engine: ServerEngine | ServedWorkers
    logprobs: Callable[[Sequence[MicroBatch]], list[Tensor]]
    """Function that returns the trainer's log-probs, [N] for each micro-batch."""
    work_thread: WorkThread
    prompt: list[int]
    sampling: SamplingParams
    """Sampling parameters, with the temperature of training, at which the trainer computes log-probs."""
    tolerance: float
    """Largest allowed mean difference between the log-probs of a server and of the trainer, in nats per token."""
    name: str
    """Name of the engine."""
    seeds: Iterator[int] = field(default_factory=count)
    """Seeds of the turns: every check, also one that is repeated, samples other tokens."""

    async def check(self, version: int) -> dict[str, float]:
        """Return the mean over the tokens of the server that differs most, and the largest difference of any token, as
        metrics; empty if no server sampled a token.

        Raises:
            WrongWeightsError: a mean is larger than the tolerance, or a token has another version.
        """
        servers = [gaps for gaps in await self._gaps(version) if len(gaps)]
        if not servers:
            return {}
        mean, largest = max(float(gaps.mean()) for gaps in servers), max(float(gaps.max()) for gaps in servers)
        if not all(float(gaps.mean()) <= self.tolerance for gaps in servers):  # this form also catches NaN
            raise self._error(
                f"log-probs of tokens that a server sampled by version {version} differ from the trainer's by "
                f"{mean:.3g} on average, more than generator.{self.name}.canary_tolerance={self.tolerance:g}"
            )
        return {"engine/canary/max": largest, "engine/canary/mean": mean}

    async def _gaps(self, version: int) -> list[Tensor]:
        """Return the absolute differences of at least `TOKENS` tokens of each server, unless its turns end early."""
        gaps = await self._draw(version)
        for _ in range(MAX_DRAWS - 1):
            if min(map(len, gaps), default=TOKENS) >= TOKENS:
                break
            more = await self._draw(version)
            same = len(more) == len(gaps)  # else servers were lost or came back, and the gaps before are of others
            gaps = [torch.cat(pair) for pair in zip(gaps, more, strict=True)] if same else more
        return gaps

    async def _draw(self, version: int) -> list[Tensor]:
        """Return the absolute differences of the tokens of one turn of each server."""
        sampling = replace(self.sampling, max_generate_length=TOKENS, seed=next(self.seeds), stop=())
        probes = await self.engine.probe(self.prompt, sampling)
        for probe in probes:
            if other := [found for found, _ in probe.version_spans if found != version]:
                raise self._error(f"a server samples by version {other[0]} instead of {version}")
        numbers = [number for number, probe in enumerate(probes) if probe.token_ids]
        samples = [self._sample(probes[number]) for number in numbers]
        batches = micro_batches(samples, [np.zeros(len(s.token_ids)) for s in samples], max_tokens=2**14)
        gaps = [torch.empty(0) for _ in probes]
        for batch, mine in zip(batches, await self.work_thread.do(self.logprobs, batches), strict=True):
            parts = (mine.cpu() - batch.rollout_logprobs).abs().split([s.action_tokens for s in batch.samples])
            for row, part in zip(batch.rows, parts, strict=True):
                gaps[numbers[row]] = part
        return gaps

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
