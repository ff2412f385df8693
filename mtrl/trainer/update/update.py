"""The update of the policy's weights from one step's samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mtrl.algorithms.kl import KlController
from mtrl.algorithms.reductions import token_weights
from mtrl.algorithms.registry import find_correction, find_loss
from mtrl.config.derived import sums_top_tokens
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.trainer.data.batching import MicroBatch, micro_batches, mini_batches
from mtrl.trainer.throughput import Computation, forwarded, trained
from mtrl.trainer.update.learner import Assignments, Learners
from mtrl.trainer.update.update_report import UpdateReport
from mtrl.types import Sample, write_jsonl


@dataclass
class UpdateResult:
    """Result of the optimiser steps of one training step."""

    report: UpdateReport = field(default_factory=UpdateReport)
    first_logprobs: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """Samples of the first optimiser step, with the trainer's log-probs [action tokens] before this step."""
    works: list[Computation] = field(default_factory=list)
    """Computation of each batch group."""


class Updater:
    """Plans the optimiser steps of a training step; denominators are those of the whole optimiser step."""

    def __init__(self, config: Config, learners: Learners, dump: Path, kl: KlController | None = None):
        """Create the updater.

        Args:
            dump: file for a batch whose loss or gradient is not finite.
        """
        self.config, self.algorithm = config, config.algorithm
        self.learners, self.dump = learners, dump
        parts = find_loss(config.algorithm.loss_fn), find_correction(config.algorithm.off_policy_correction)
        self._whole_trajectories = any(part.per_trajectory for part in parts)
        self.kl = kl or KlController(config.algorithm.kl_loss_coef)
        """Weight of the KL term; it changes during a run if `kl_target` is set."""

    def run(self, samples: list[Sample], step: int) -> UpdateResult:
        """Train on all samples of training step `step` (0-based).

        Raises:
            UserError: a loss or a gradient is not finite. The batch is written to the dump file, and the optimiser step
                did not change the weights.
        """
        parts = [self._batches(part) for part in mini_batches(samples, self.config.trainer, self.config.seed, step)]
        assignments, reports = self.learners.update([part for part in parts if part], step, self.kl.coefficient)
        report = UpdateReport.joined(reports)
        if stopped := report.stopped:
            write_jsonl(self.dump, samples, mode="w")
            raise UserError(
                f"the {stopped.what} is {stopped.value} at step {step + 1}; the batch is in {self.dump} and the "
                "weights are as before: look at its log-probs and advantages, then lower trainer.optimizer.lr or raise "
                "model.dtype to float32"
            )
        works = [self._work([b for part in assignments for b in part[group]]) for group in range(len(reports))]
        return UpdateResult(report, first_logprobs(assignments, reports), works)

    def _work(self, batches: list[MicroBatch]) -> Computation:
        """Return the work of one batch group: the passes of the optimiser steps, and the additional passes without
        gradients."""
        model, algorithm = self.learners.model, self.algorithm
        extra = (algorithm.loss_anchor == "old") + bool(algorithm.kl_loss_coef)
        done = [trained(model, batch) for batch in batches]
        done += [forwarded(model, batch) for batch in batches] * extra
        return sum(done, Computation())

    def _batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """Return the micro-batches of samples with a gradient; samples that are left out still count in the
        denominators."""
        algorithm = self.algorithm
        weights = token_weights(samples, algorithm.loss_reduction, algorithm)
        pairs = list(zip(samples, weights, strict=True))
        coefficients = (algorithm.kl_loss_coef, algorithm.entropy_coef, algorithm.expert_balance_coef)
        others = any(coefficients) or sums_top_tokens(self.config)
        if algorithm.drop_zero_advantage and not others:  # no other term of the loss has a gradient
            # Whole trajectories are dropped or kept, since losses per trajectory need all samples of a trajectory.
            with_advantage = {key(sample) for sample in samples if any(sample.advantages)}
            pairs = [(sample, weight) for sample, weight in pairs if key(sample) in with_advantage]
        return micro_batches(
            [sample for sample, _ in pairs],
            [weight for _, weight in pairs],
            self.config.trainer.max_tokens_per_microbatch,
            layout=self.learners.layout,
            whole_trajectories=self._whole_trajectories,
            ranks=self.learners.data_parallel,
        )


def first_logprobs(assignments: Assignments, reports: Sequence[UpdateReport]) -> list[tuple[Sample, Tensor]]:
    """Return the samples of the first optimiser step with the trainer's log-probs [action tokens] before this step,
    batch group by batch group."""
    groups = assignments[0] if assignments else []
    return [
        pair
        for batches, report in zip(groups, reports, strict=False)
        for batch, logprobs in zip([b for b in batches if not b.is_filler], report.first_logprobs, strict=True)
        for pair in per_sample(batch, logprobs)
    ]


def per_sample(batch: MicroBatch, logprobs: Tensor) -> list[tuple[Sample, Tensor]]:
    """Split the log-probs [N] of a micro-batch by sample."""
    parts = logprobs.split([sample.action_tokens for sample in batch.samples])
    return list(zip(batch.samples, parts, strict=True))


def key(sample: Sample) -> tuple[str, int]:
    """Return the key of a sample's trajectory: group id and index."""
    return sample.group_id, sample.trajectory
