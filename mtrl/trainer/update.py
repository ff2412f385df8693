"""From one step's groups to new weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mtrl.algorithms.corrections import Reweighting
from mtrl.algorithms.kl import KlController, k3
from mtrl.algorithms.losses import weighted_sum
from mtrl.algorithms.mismatch import Drift, measure
from mtrl.algorithms.reductions import token_weights
from mtrl.algorithms.registry import find_correction, find_kl, find_loss
from mtrl.algorithms.tokens import TokenBatch
from mtrl.config.schema import Config
from mtrl.errors import UserError
from mtrl.trainer.batching import PACKED, PADDED, MicroBatch, micro_batches
from mtrl.trainer.mini_batches import mini_batches
from mtrl.trainer.optimizer import Optimizer
from mtrl.trainer.policy import Policy
from mtrl.types import Sample, write_jsonl


@dataclass
class UpdateReport:
    """Sums over the optimiser steps of one training step."""

    updates: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    trained_tokens: int = 0
    token_sums: Counter[str] = field(default_factory=Counter)
    drift: Drift = Drift()
    """Between trainer and engine, before the first weight changed."""
    reweighting: Reweighting = Reweighting()
    """By the off-policy correction."""
    looked_at: list[tuple[Sample, Tensor]] = field(default_factory=list)
    """The samples of the first optimiser step, with the trainer's log-probs [action tokens] before it."""

    def metrics(self) -> dict[str, float]:
        out: dict[str, float] = {"train/updates": float(self.updates), "train/tokens": float(self.trained_tokens)}
        if not self.updates:
            return out
        out |= {f"train/{name}": total / self.trained_tokens for name, total in self.token_sums.items()}
        out |= {
            "train/loss": self.loss / self.updates,
            "train/grad_norm": self.grad_norm / self.updates,
            "train/lr": self.lr,
        }
        drift = self.drift.metrics("analysis/mismatch/")
        out |= {"analysis/logprob_drift/mean": drift["analysis/mismatch/abs_mean"]}
        out |= {"analysis/logprob_drift/max": drift["analysis/mismatch/abs_max"]}
        return out | drift | self.reweighting.metrics("analysis/correction/")


class Updater:
    """Runs the optimiser steps of a training step; denominators are those of the whole optimiser step."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        reference: Policy | None,
        optimizer: Optimizer,
        dump: Path,
        kl: KlController | None = None,
    ):
        self.config, self.algorithm = config, config.algorithm
        self.policy, self.reference, self.optimizer = policy, reference, optimizer
        self.dump = dump
        self._loss = find_loss(config.algorithm.loss_fn)
        self._correction = find_correction(config.algorithm.off_policy_correction)
        self._kl = find_kl(config.algorithm.kl_estimator)
        self.kl = kl or KlController(config.algorithm.kl_loss_coef)
        """Weight of the KL term; it changes over a run where `kl_target` is set."""

    def run(self, samples: list[Sample], step: int) -> UpdateReport:
        """Train on all samples of training step `step` (0-based).

        Raises:
            UserError: a loss or a gradient is not finite; the batch is dumped and the weights are as before it.
        """
        report = UpdateReport()
        parts = mini_batches(samples, self.config.trainer, self.config.seed, step)
        batches = [self._batches(part) for part in parts]
        for part, anchors in zip(batches, [self._anchors(part) for part in batches], strict=True):
            if part:
                self._optimiser_step(part, anchors, step, report, samples)
        return report

    def _batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """Micro-batches of what has a gradient; what is left out still counts in the denominators."""
        algorithm = self.algorithm
        weights = token_weights(samples, algorithm.loss_reduction, algorithm)
        pairs = list(zip(samples, weights, strict=True))
        if algorithm.drop_zero_advantage and not algorithm.kl_loss_coef and not algorithm.entropy_coef:
            # A trajectory stays whole: what is per trajectory needs all of its samples.
            taught = {key(sample) for sample in samples if any(sample.advantages)}
            pairs = [(sample, weight) for sample, weight in pairs if key(sample) in taught]
        return micro_batches(
            [sample for sample, _ in pairs],
            [weight for _, weight in pairs],
            self.config.trainer.max_tokens_per_microbatch,
            self.policy.device,
            layout=PACKED if self.config.trainer.packing else PADDED,
            whole_trajectories=self._loss.per_trajectory or self._correction.per_trajectory,
        )

    def _anchors(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Log-probs of the old policy: the engine's, or the trainer's own before the first of the step's updates."""
        if self.algorithm.loss_anchor == "old":
            return self.policy.all_logprobs(batches)
        return [batch.rollout_logprobs for batch in batches]

    def _optimiser_step(
        self, batches: list[MicroBatch], anchors: list[Tensor], step: int, report: UpdateReport, samples: list[Sample]
    ) -> None:
        total = 0.0
        for batch, anchor in zip(batches, anchors, strict=True):
            logprobs, entropy = self.policy.logprobs(batch)
            if not report.updates:
                report.drift += measure(logprobs, batch.rollout_logprobs, trajectory=batch.trajectory)
                report.looked_at += per_sample(batch, logprobs)
            tokens = TokenBatch(logprobs, anchor, batch.advantages, batch.rollout_logprobs, batch.trajectory)
            losses, shown = self._loss(tokens, self.algorithm)
            if self._correction.name != "none":
                weights = self._corrections(tokens)
                report.reweighting += Reweighting.of(weights)
                losses = losses * weights
            if self.reference is not None and self.algorithm.kl_loss_coef:
                reference = self.reference.all_logprobs([batch])[0]
                losses = losses + self.kl.coefficient * self._kl(logprobs, reference, anchor)
                # Whatever the loss takes, the metric is k3: its expected value is the KL, and it is never negative.
                report.token_sums["kl"] += k3(logprobs.detach(), reference, anchor).sum().item()
            if self.algorithm.entropy_coef:
                losses = losses - self.algorithm.entropy_coef * entropy
            loss = weighted_sum(losses, batch.weights)
            total += loss.item()
            if not math.isfinite(total):
                self._stop("loss", total, step, samples)
            loss.backward()
            report.trained_tokens += len(logprobs)
            report.token_sums["entropy"] += entropy.detach().sum().item()
            report.token_sums["clip_frac"] += shown["clipped"].sum().item() if "clipped" in shown else 0.0
        norm, report.lr = self.optimizer.step(step)
        if not math.isfinite(norm):
            self._stop("gradient norm", norm, step, samples)
        report.updates += 1
        report.loss += total
        report.grad_norm += norm

    def _corrections(self, tokens: TokenBatch) -> Tensor:
        """[N] weights on the loss."""
        trainer = tokens.old_logprobs if self.algorithm.loss_anchor == "old" else tokens.logprobs.detach()
        return self._correction(trainer - tokens.behaviour, tokens, self.algorithm)

    def _stop(self, what: str, value: float, step: int, samples: list[Sample]) -> None:
        write_jsonl(self.dump, samples, mode="w")
        raise UserError(
            f"the {what} is {value} at step {step + 1}; the batch is in {self.dump} and the weights are as before: "
            "look at its log-probs and advantages, then lower trainer.optimizer.lr or raise model.dtype to float32"
        )


def per_sample(batch: MicroBatch, logprobs: Tensor) -> list[tuple[Sample, Tensor]]:
    """The [N] log-probs of a micro-batch, sample by sample."""
    parts = logprobs.detach().split([sample.action_tokens for sample in batch.samples])
    return list(zip(batch.samples, parts, strict=True))


def key(sample: Sample) -> tuple[str, int]:
    """The trajectory that a sample is of."""
    return sample.group_id, sample.trajectory
