"""The optimiser steps of the policy on each rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from mtrl.algorithms.corrections import Reweighting
from mtrl.algorithms.kl import k3
from mtrl.algorithms.losses import weighted_sum
from mtrl.algorithms.mismatch import Drift, measure
from mtrl.algorithms.registry import find_correction, find_kl, find_loss
from mtrl.algorithms.tokens import TokenBatch
from mtrl.config.schema import Config
from mtrl.distributed.sums import all_sum
from mtrl.trainer.data.batching import MicroBatch
from mtrl.trainer.update.optimizer import Optimizer
from mtrl.trainer.update.policy import Policy


class NonFiniteError(ArithmeticError):
    """A loss or a gradient norm is not finite; the optimiser step did not change the weights."""

    def __init__(self, what: str, value: float):
        super().__init__(what, value)
        self.what, self.value = what, value


@dataclass
class UpdateReport:
    """Sums over the optimiser steps of one training step, on one rank or over all ranks (`joined`)."""

    updates: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    trained_tokens: int = 0
    token_sums: Counter[str] = field(default_factory=Counter)
    drift: Drift = Drift()
    """Drift between trainer and engine before the first optimiser step, over tokens that the current weights
    sampled."""
    shift: Drift = Drift()
    """The same over tokens that older weights sampled; it is mostly the effect of the updates since then."""
    reweighting: Reweighting = Reweighting()
    """Statistics of the off-policy correction's weights."""
    first_logprobs: list[Tensor] = field(default_factory=list)
    """Log-probs [N] of each micro-batch of the first optimiser step, before this step; only of this rank, not
    joined."""
    stopped: NonFiniteError | None = None
    """Error that ended the training step before its last optimiser step, the same on every rank; None without one."""

    @classmethod
    def joined(cls, reports: Iterable[UpdateReport]) -> UpdateReport:
        """Sum the reports over ranks; gradient norm and learning rate are equal on all ranks."""
        first, *others = reports
        whole = replace(first, token_sums=Counter(first.token_sums), first_logprobs=[])
        for other in others:
            whole.loss += other.loss
            whole.trained_tokens += other.trained_tokens
            whole.token_sums.update(other.token_sums)
            whole.drift += other.drift
            whole.shift += other.shift
            whole.reweighting += other.reweighting
        return whole

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
        if drift := self.drift.metrics("analysis/mismatch/"):
            out |= {"analysis/logprob_drift/mean": drift["analysis/mismatch/abs_mean"]}
            out |= {"analysis/logprob_drift/max": drift["analysis/mismatch/abs_max"]}
        if shift := self.shift.metrics(""):
            out |= {"analysis/staleness/logprob_shift": shift["abs_mean"]}
        return out | drift | self.reweighting.metrics("analysis/correction/")


class Reference(Protocol):
    """Reference policy of the KL."""

    def all_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs [N] of each micro-batch, without gradients."""


class PolicyLearner:
    """The policy, its reference and its optimiser on one rank, which trains on the micro-batches that it receives."""

    def __init__(self, config: Config, policy: Policy, reference: Reference | None, optimizer: Optimizer):
        self.algorithm = config.algorithm
        self.policy, self.reference, self.optimizer = policy, reference, optimizer
        self._loss = find_loss(config.algorithm.loss_fn)
        self._correction = find_correction(config.algorithm.off_policy_correction)
        self._kl = find_kl(config.algorithm.kl_estimator)

    def update(self, parts: list[list[MicroBatch]], step: int, kl_coefficient: float) -> UpdateReport:
        """Make the optimiser steps of training step `step` (0-based), one for each of `parts`."""
        report = UpdateReport()
        try:
            for part, anchors in zip(parts, [self._anchors(part) for part in parts], strict=True):
                self._optimiser_step(part, anchors, step, kl_coefficient, report)
        except NonFiniteError as error:
            report.stopped = error
        return report

    def reference_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the reference's log-probs, [N] for each micro-batch, on the CPU."""
        assert self.reference is not None
        return [self.reference.all_logprobs([batch.to(self.policy.device)])[0].cpu() for batch in batches]

    def logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs under the policy's current weights, [N] for each micro-batch, on the CPU."""
        return [self.policy.all_logprobs([batch.to(self.policy.device)])[0].cpu() for batch in batches]

    def _anchors(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probs of the old policy, by `algorithm.loss_anchor`: the engine's, or the trainer's before the
        first optimiser step."""
        if self.algorithm.loss_anchor == "old":
            return [self.policy.all_logprobs([batch.to(self.policy.device)])[0] for batch in batches]
        return [batch.rollout_logprobs.to(self.policy.device) for batch in batches]

    def _optimiser_step(
        self,
        batches: list[MicroBatch],
        anchors: list[Tensor],
        step: int,
        kl_coefficient: float,
        report: UpdateReport,
    ) -> None:
        total = 0.0
        for batch, anchor in zip(batches, anchors, strict=True):
            loss = self._loss_of(batch.to(self.policy.device), anchor, step, kl_coefficient, report)
            total += loss.item()
            loss.backward()
        if not math.isfinite(everywhere := all_sum(total, self.policy.device)):
            raise NonFiniteError("loss", everywhere)
        norm, report.lr = self.optimizer.step(step)
        if not math.isfinite(norm):
            raise NonFiniteError("gradient norm", norm)
        report.updates += 1
        report.loss += total
        report.grad_norm += norm

    def _loss_of(
        self, batch: MicroBatch, anchor: Tensor, step: int, kl_coefficient: float, report: UpdateReport
    ) -> Tensor:
        """Return this micro-batch's part of the loss of the whole optimiser step; it is 0 for a filler."""
        logprobs, entropy = self.policy.logprobs(batch)
        reference = self._reference(batch)
        tokens = TokenBatch(logprobs, anchor, batch.advantages, batch.rollout_logprobs, batch.trajectory)
        losses, shown = self._loss(tokens, self.algorithm)
        if batch.is_filler:
            return weighted_sum(logprobs, batch.weights)
        if not report.updates:
            fresh = batch.versions == step
            report.drift += measure(logprobs, batch.rollout_logprobs, fresh, batch.trajectory)
            report.shift += measure(logprobs, batch.rollout_logprobs, ~fresh)
            report.first_logprobs.append(logprobs.detach().cpu())
        if self._correction.name != "none":
            weights = self._corrections(tokens)
            report.reweighting += Reweighting.of(weights)
            losses = losses * weights
        if reference is not None:
            losses = losses + kl_coefficient * self._kl(logprobs, reference, anchor)
            # The metric is k3 for every estimator of the loss: its expected value is the KL, and it is never negative.
            report.token_sums["kl"] += k3(logprobs.detach(), reference, anchor).sum().item()
        if self.algorithm.entropy_coef:
            losses = losses - self.algorithm.entropy_coef * entropy
        report.trained_tokens += len(logprobs)
        report.token_sums["entropy"] += entropy.detach().sum().item()
        report.token_sums["clip_frac"] += shown["clipped"].sum().item() if "clipped" in shown else 0.0
        return weighted_sum(losses, batch.weights)

    def _reference(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None or not self.algorithm.kl_loss_coef:
            return None
        return self.reference.all_logprobs([batch])[0]

    def _corrections(self, tokens: TokenBatch) -> Tensor:
        """Return the correction's weights on the loss, [N]."""
        trainer = tokens.old_logprobs if self.algorithm.loss_anchor == "old" else tokens.logprobs.detach()
        return self._correction(trainer - tokens.behaviour, tokens, self.algorithm)
