"""Throughput metrics: tokens sampled and trained per second of a step, idle times of trainer and generator, and peak
memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from mtrl.trainer.data.batching import MicroBatch, spans
from mtrl.trainer.flops import ModelFlops
from mtrl.types import Group

WAITING = ("wait", "generate")
"""Phases of a step in which the trainer is idle: it waits for groups, or for the generator with which it alternates."""


@dataclass(frozen=True)
class Computation:
    """Computation of one batch group, the ranks that share each micro-batch (one by default); `+` adds over
    micro-batches and over groups."""

    tokens: int = 0
    """Number of tokens of the samples that were trained, context included."""
    cells: int = 0
    """Number of positions of the micro-batches, padding included."""
    flops: float = 0.0
    """FLOPs of all passes, including those without gradients."""

    def __add__(self, other: Computation) -> Computation:
        return Computation(self.tokens + other.tokens, self.cells + other.cells, self.flops + other.flops)


def trained(model: ModelFlops, batch: MicroBatch) -> Computation:
    """Return the work of a forward and a backward pass over a micro-batch; a filler counts as padding."""
    tokens = sum(len(sample.token_ids) for sample in batch.samples)
    return Computation(tokens, batch.token_ids.numel(), _flops(model.training, batch))


def forwarded(model: ModelFlops, batch: MicroBatch) -> Computation:
    """Return the work of a pass without gradients, by the reference or for the log-probs of the old policy."""
    return Computation(flops=_flops(model.forward, batch))


def _flops(count: Callable[[Sequence[int], int], float], batch: MicroBatch) -> float:
    """Return the FLOPs of a pass by the function that counts them for whole samples. Shared prefixes count once."""
    if not batch.samples:
        return 0.0
    sampled = batch.weights.numel()
    if batch.position_ids is None:
        return count([len(sample.token_ids) for sample in batch.samples], sampled)
    starts, ends = spans(batch.position_ids)
    return count(ends, sampled) - count(starts, 0)


@dataclass(frozen=True)
class Throughput:
    """Computation of a step's throughput metrics."""

    peak: float | None = None
    """Peak FLOP/s of the ranks of one batch group (`peak_flops`); None: unknown, so that there is no MFU."""

    def metrics(
        self,
        seconds: Mapping[str, float],
        groups: Sequence[Group],
        works: Sequence[Computation],
        sampling_seconds: float | None = None,
    ) -> dict[str, float]:
        """Return the metrics of a training step, without those that are unknown or do not apply.

        `time/NAME`                        seconds of the trainer in `generate` or `wait`, `credit`, `update`, `sync`, …
        `time/step`                        their sum
        `time/{generate,environment}_per_turn`  mean seconds of a turn; many turns run at the same time
        `time/{generate,environment}_all_turns` sum of these seconds over all turns, as if they ran one after another
        `perf/update_tokens_per_second`    tokens trained, context included, per second of the update
        `perf/rollout_tokens_per_second`   tokens sampled per second in which turns were sampled
        `perf/mfu`                         FLOPs of the update, as a share of the ranks' peak FLOPs in the same time
        `perf/packing_efficiency`          tokens trained / positions of the micro-batches: lower with padding, above
                                           1 with shared prefixes
        `perf/rank_balance`                mean FLOPs over batch groups / FLOPs of the busiest: 1 is no waiting
        `perf/idle_frac`                   share of the step in which the trainer waited for rollouts
        `perf/rollout_idle_frac`           share of the step in which no turn was sampled

        Args:
            seconds: duration of each phase of the trainer, in seconds, by its name in the timeline.
            groups: all groups that were sampled for the step.
            works: work of each batch group.
            sampling_seconds: time in which at least one turn was sampled (`Occupancy`), in seconds; None: the whole of
                `generate`.
        """
        step = sum(seconds.values())
        if sampling_seconds is None:
            sampling_seconds = seconds.get("generate")
        found = {f"time/{name}": value for name, value in seconds.items()} | {"time/step": step}
        found |= turn_metrics(groups)
        found |= self._update_metrics(seconds.get("update", 0.0), works)
        if step:
            found["perf/idle_frac"] = sum(seconds.get(name, 0.0) for name in WAITING) / step
        if sampling_seconds and step:
            sampled = sum(trajectory.action_tokens for group in groups for trajectory in group.trajectories)
            found["perf/rollout_tokens_per_second"] = sampled / sampling_seconds
            found["perf/rollout_idle_frac"] = max(0.0, 1.0 - sampling_seconds / step)
        return found

    def _update_metrics(self, seconds: float, works: Sequence[Computation]) -> dict[str, float]:
        total = sum(works, Computation())
        if not seconds or not total.cells:
            return {}
        found = {
            "perf/update_tokens_per_second": total.tokens / seconds,
            "perf/packing_efficiency": total.tokens / total.cells,
        }
        if self.peak:
            found["perf/mfu"] = total.flops / (seconds * self.peak * len(works))
        if len(works) > 1:
            found["perf/rank_balance"] = total.flops / len(works) / max(work.flops for work in works)
        return found


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return `time/{generate,environment}_{per_turn,all_turns}`, in seconds; empty without turns."""
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    if not turns:
        return {}
    generating = [turn.seconds_generate for turn in turns]
    acting = [turn.seconds_environment for turn in turns]
    return {
        "time/generate_per_turn": fmean(generating),
        "time/generate_all_turns": sum(generating),
        "time/environment_per_turn": fmean(acting),
        "time/environment_all_turns": sum(acting),
    }


def peak_memory() -> dict[str, float]:
    """Return `perf/memory_bytes`, the peak memory of the process, and `perf/gpu_memory_bytes`, the peak on the GPU, if
    there is one.

    The peak on the GPU is counted from the last call, so that it is the peak of one step.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    found = {"perf/memory_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if torch.cuda.is_available():
        found["perf/gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return found
