"""The learners of all ranks, as the leader sees them: work is dealt to them, and results come back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mtrl.distributed.crew import Crew
from mtrl.distributed.world import World
from mtrl.trainer.batching import MicroBatch
from mtrl.trainer.dealing import deal
from mtrl.trainer.flops import ModelFlops
from mtrl.trainer.learner import Learner
from mtrl.trainer.policy_learner import UpdateReport
from mtrl.trainer.value_learner import CriticReport, Lesson


@dataclass
class Dealt:
    """Who worked on what in the optimiser steps of a training step, and what came of it."""

    hands: list[list[list[MicroBatch]]]
    """By optimiser step and rank."""
    reports: list[UpdateReport]
    """By rank."""

    @property
    def report(self) -> UpdateReport:
        """Of all ranks."""
        return UpdateReport.joined(self.reports)

    @property
    def first_logprobs(self) -> Iterator[tuple[MicroBatch, Tensor]]:
        """The micro-batches of the first optimiser step, with the log-probs [N] before it."""
        for hand, report in zip(self.hands[0] if self.hands else (), self.reports, strict=False):
            yield from zip([batch for batch in hand if not batch.is_filler], report.first_logprobs, strict=True)

    @property
    def by_rank(self) -> list[list[MicroBatch]]:
        """All micro-batches that each rank worked on."""
        return [[b for part in self.hands for b in part[rank]] for rank in range(len(self.reports))]


class Learners:
    """Deals micro-batches to the `Learner` of every rank; with one process a thin layer over its own."""

    def __init__(self, crew: Crew, model: ModelFlops):
        self.crew, self.ranks, self.model = crew, crew.world.size, model

    def reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[N] of each micro-batch by the reference, on the CPU."""
        return self._forward("reference_logprobs", batches)

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[N] of each micro-batch by the policy, on the CPU."""
        return self._forward("logprobs", batches)

    def values(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """[N] of each micro-batch by the critic, on the CPU."""
        return self._forward("values", batches)

    def update(self, parts: Sequence[Sequence[MicroBatch]], step: int, kl_coefficient: float) -> Dealt:
        """One optimiser step of the policy for each part, until a loss or a gradient is not finite."""
        hands = [self._deal(part) for part in parts]
        return Dealt(hands, self.crew.run("update", self._shares(hands), step, kl_coefficient))

    def update_critic(self, parts: Sequence[Sequence[Lesson]], step: int) -> CriticReport:
        """One optimiser step of the critic for each part, until a loss or a gradient is not finite."""
        hands = []
        for part in parts:
            taught = {id(batch.token_ids): (old, wanted) for batch, old, wanted in part}
            dealt = self._deal([batch for batch, _, _ in part])
            hands.append([[(batch, *taught[id(batch.token_ids)]) for batch in hand] for hand in dealt])
        return CriticReport.joined(self.crew.run("update_critic", self._shares(hands), step))

    def weights(self) -> dict[str, Tensor]:
        """What an engine with weights of its own is to load."""
        return self.crew.run("weights")[0]

    def release(self) -> None:
        """Leave GPU memory that no tensor holds any more to the servers that share the GPUs of all ranks."""
        self.crew.run("release")

    def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self.crew.run("export", None, folder)

    def save(self, folder: Path, commit: Callable[[], object]) -> None:
        """Write the tensors of all ranks into `folder`; `commit` is called once they are there.

        Raises:
            UserError: this checkpoint, or the one before, could not be written.
        """
        self.crew.run("save", None, folder)
        self.crew.worker.saver.finish(commit)

    @property
    def is_saving(self) -> bool:
        """Whether the leader still writes what was saved; the other ranks may go on after it."""
        return self.crew.worker.saver.is_busy

    def wait_saved(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            UserError: it could not be written.
        """
        self.crew.run("wait_saved")

    def load(self, folder: Path) -> None:
        """Go on from the tensors of a checkpoint, on every rank.

        Raises:
            UserError: they do not fit.
        """
        self.crew.run("load", None, folder)

    def _deal(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        return deal(batches, self.ranks, self.model)

    def _forward(self, method: str, batches: Sequence[MicroBatch]) -> list[Tensor]:
        hands = self._deal(batches)
        results = self.crew.run(method, [(self._sent(hand),) for hand in hands])
        found = {
            id(batch): values
            for hand, own in zip(hands, results, strict=True)
            for batch, values in zip(hand, own, strict=True)
        }
        return [found[id(batch)] for batch in batches]

    def _shares(self, parts: Sequence[Sequence[Sequence[Any]]]) -> list[tuple[list[list[Any]]]]:
        """From hands by part to one argument per rank: its hand of every part."""
        return [([self._sent(part[rank]) for part in parts],) for rank in range(self.ranks)]

    def _sent(self, hand: Sequence[Any]) -> list[Any]:
        """What goes to another process leaves the samples behind."""
        if self.ranks == 1:
            return list(hand)
        return [
            item.without_samples() if isinstance(item, MicroBatch) else (item[0].without_samples(), *item[1:])
            for item in hand
        ]


def alone(learner: Learner) -> Learners:
    """One process and nothing else."""
    return Learners(Crew(World(), learner), learner.flops)
