"""The learners of all ranks for the leader: work is distributed to them, and results are returned in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mtrl.distributed.crew import Crew
from mtrl.distributed.world import World
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.data.rank_balance import balance
from mtrl.trainer.flops import ModelFlops
from mtrl.trainer.update.learner import Learner
from mtrl.trainer.update.policy_learner import UpdateReport
from mtrl.trainer.update.value_learner import CriticReport, ValueBatch


@dataclass
class DistributedUpdate:
    """The micro-batches of each rank in the optimiser steps of a training step, and the reports."""

    assignments: list[list[list[MicroBatch]]]
    """Micro-batches by optimiser step and rank."""
    reports: list[UpdateReport]
    """Reports by rank."""

    @property
    def report(self) -> UpdateReport:
        """Report over all ranks."""
        return UpdateReport.joined(self.reports)

    @property
    def first_logprobs(self) -> Iterator[tuple[MicroBatch, Tensor]]:
        """The micro-batches of the first optimiser step, with the trainer's log-probs [N] before this step."""
        for rank_batches, report in zip(self.assignments[0] if self.assignments else (), self.reports, strict=False):
            yield from zip([batch for batch in rank_batches if not batch.is_filler], report.first_logprobs, strict=True)

    @property
    def by_rank(self) -> list[list[MicroBatch]]:
        """All micro-batches of each rank."""
        return [[b for part in self.assignments for b in part[rank]] for rank in range(len(self.reports))]


class Learners:
    """Distributes micro-batches to the `Learner` of every rank; with one process it only calls that process's
    learner."""

    def __init__(self, crew: Crew, model: ModelFlops):
        self.crew, self.ranks, self.model = crew, crew.world.size, model

    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the reference's log-probs, [N] for each micro-batch, on the CPU."""
        return self._forward("reference_logprobs", batches)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the policy's log-probs, [N] for each micro-batch, on the CPU."""
        return self._forward("logprobs", batches)

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the critic's values, [N] for each micro-batch, on the CPU."""
        return self._forward("values", batches)

    def update(self, parts: Sequence[Sequence[MicroBatch]], step: int, kl_coefficient: float) -> DistributedUpdate:
        """Make one optimiser step of the policy for each part, until a loss or a gradient is not finite."""
        assignments = [self._balance(part) for part in parts]
        return DistributedUpdate(assignments, self.crew.run("update", self._shares(assignments), step, kl_coefficient))

    def update_critic(self, parts: Sequence[Sequence[ValueBatch]], step: int) -> CriticReport:
        """Make one optimiser step of the critic for each part, until a loss or a gradient is not finite."""
        assignments = []
        for part in parts:
            values_of = {id(batch.token_ids): (old, wanted) for batch, old, wanted in part}
            balanced = self._balance([batch for batch, _, _ in part])
            assignments.append(
                [[(batch, *values_of[id(batch.token_ids)]) for batch in batches] for batches in balanced]
            )
        return CriticReport.joined(self.crew.run("update_critic", self._shares(assignments), step))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights for an engine with its own copy."""
        return self.crew.run("weights")[0]

    def release(self) -> None:
        """Free cached GPU memory of all ranks for the servers that share the GPUs."""
        self.crew.run("release")

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self.crew.run("export", None, folder)

    def save(self, folder: Path, commit: Callable[[], object]) -> None:
        """Write the tensors of all ranks into `folder`; `commit` is called once they are written.

        Raises:
            UserError: this checkpoint, or the one before, could not be written.
        """
        self.crew.run("save", None, folder)
        self.crew.worker.saver.finish(commit)

    @property
    def is_saving(self) -> bool:
        """Whether the leader is still writing a checkpoint; other ranks may still write after it has finished."""
        return self.crew.worker.saver.is_busy

    def wait_saved(self) -> None:
        """Return when the last checkpoint is on the disk.

        Raises:
            UserError: the checkpoint could not be written.
        """
        self.crew.run("wait_saved")

    def load(self, folder: Path) -> None:
        """Load the tensors of a checkpoint on every rank.

        Raises:
            UserError: the tensors do not fit the model and the settings.
        """
        self.crew.run("load", None, folder)

    def _balance(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return balance(batches, self.ranks, self.model)

    def _forward(self, method: str, batches: Sequence[MicroBatch]) -> list[Tensor]:
        assignments = self._balance(batches)
        results = self.crew.run(method, [(self._sent(rank_batches),) for rank_batches in assignments])
        found = {
            id(batch): values
            for rank_batches, own in zip(assignments, results, strict=True)
            for batch, values in zip(rank_batches, own, strict=True)
        }
        return [found[id(batch)] for batch in batches]

    def _shares(self, parts: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[list[list[Any]]]]:
        """Return the arguments of each rank: its micro-batches of every part."""
        return [([self._sent(part[rank]) for part in parts],) for rank in range(self.ranks)]

    def _sent(self, rank_batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches of a rank, without samples if they are sent to another process."""
        if self.ranks == 1:
            return list(rank_batches)
        return [
            item.without_samples() if isinstance(item, MicroBatch) else (item[0].without_samples(), *item[1:])
            for item in rank_batches
        ]


def alone(learner: Learner) -> Learners:
    """Return the learners of a single process."""
    return Learners(Crew(World(), learner), learner.flops)
