"""Throughput: how much was sampled and trained in the time of a step, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from mtrl.trainer.batching import MicroBatch
from mtrl.trainer.flops import ModelFlops
from mtrl.types import Group

WAITING = ("wait", "generate")
"""What a trainer does that does nothing: it waits for groups, or takes turns with the generator."""


@dataclass(frozen=True)
class Work:
    """What one rank computed of its micro-batches; adds up over micro-batches and over ranks."""

    tokens: int = 0
    """Of the samples that were trained, context included."""
    cells: int = 0
    """Of the grids in which they lay, padding included."""
    flops: float = 0.0
    """Of all passes, those without gradients as well."""

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.cells + other.cells, self.flops + other.flops)


def trained(model: ModelFlops, batch: MicroBatch) -> Work:
    """A forward and a backward pass over a micro-batch; a filler is padding."""
    lengths, sampled = _tokens(batch)
    return Work(sum(lengths), batch.token_ids.numel(), model.training(lengths, sampled))


def forwarded(model: ModelFlops, batch: MicroBatch) -> Work:
    """A pass without gradients: of the reference, or for the log-probs of the old policy."""
    return Work(flops=model.forward(*_tokens(batch)))


def _tokens(batch: MicroBatch) -> tuple[list[int], int]:
    """Of each sample; and those that were sampled, of all of them."""
    return [len(sample.token_ids) for sample in batch.samples], batch.weights.numel() if batch.samples else 0


@dataclass(frozen=True)
class Throughput:
    """The metrics of a step."""

    peak: float | None = None
    """FLOP/s that one rank could do at best (`peak_flops`); None: unknown, and there is no MFU."""

    def metrics(
        self,
        seconds: Mapping[str, float],
        groups: Sequence[Group],
        works: Sequence[Work],
        sampling_seconds: float | None = None,
    ) -> dict[str, float]:
        """What a step of training achieved; what cannot be known or was not done is left out.

        `time/NAME`                        seconds of the trainer in `generate` or `wait`, `credit`, `update`, `sync`, …
        `time/step`                        their sum
        `time/{generate,environment}_per_turn`  mean over turns, which overlap: many are played at once
        `time/{generate,environment}_all_turns` their sum, of all turns, as if they were played one after the other
        `perf/update_tokens_per_second`    tokens trained, context included, per second of the update
        `perf/rollout_tokens_per_second`   tokens sampled per second in which turns were sampled
        `perf/mfu`                         FLOPs that the update needed, of those the ranks could have done meanwhile
        `perf/packing_efficiency`          tokens trained, of the cells of the micro-batches: 1 is no padding
        `perf/rank_balance`                mean over ranks of their FLOPs, of the busiest one's: 1 is no waiting
        `perf/idle_frac`                   share of the step in which the trainer waited for rollouts
        `perf/rollout_idle_frac`           share of the step in which no turn was sampled

        Args:
            seconds: what the trainer did one after the other, by the names of the timeline.
            groups: those of which the step learnt, with all that was played for them.
            works: of each rank.
            sampling_seconds: in which at least one turn was sampled (`Occupancy`); None: all of `generate`.
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

    def _update_metrics(self, seconds: float, works: Sequence[Work]) -> dict[str, float]:
        total = sum(works, Work())
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
    """`time/{generate,environment}_{per_turn,all_turns}`, in seconds; nothing for no turns."""
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
