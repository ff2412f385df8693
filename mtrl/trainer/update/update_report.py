"""Reports of the optimiser steps of one training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from mtrl.algorithms.corrections import Reweighting
from mtrl.algorithms.mismatch import DriftSums


class NonFiniteError(ArithmeticError):
    """A loss or a gradient norm is not finite; the optimiser step did not change the weights."""

    def __init__(self, what: str, value: float):
        super().__init__(what, value)
        self.what, self.value = what, value


@dataclass
class UpdateReport:
    """Sums over the optimiser steps of the policy, on one rank or over all ranks (`joined`)."""

    updates: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    trained_tokens: int = 0
    token_sums: Counter[str] = field(default_factory=Counter)
    """Sums over trained tokens of the metrics `train/NAME`, by name."""
    drift: DriftSums = DriftSums()
    """Drift between trainer and engine before the first optimiser step, over tokens that the current weights
    sampled."""
    shift: DriftSums = DriftSums()
    """The same over tokens that older weights sampled; it is mostly the effect of the updates since then."""
    reweighting: Reweighting = Reweighting()
    """Statistics of the off-policy correction's weights."""
    expert_tokens: Tensor | None = None
    """Number of sampled tokens [layers, E] that each expert of a mixture got; None for a dense model."""
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
            if other.expert_tokens is not None:
                whole.count_experts(other.expert_tokens)
        return whole

    def count_experts(self, tokens: Tensor) -> None:
        """Add the numbers of tokens [layers, E] of each expert."""
        self.expert_tokens = tokens if self.expert_tokens is None else self.expert_tokens + tokens

    def metrics(self) -> dict[str, float]:
        """Return the metrics `train/…` and `analysis/…`: means over optimiser steps, or over trained tokens."""
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
        return out | drift | self.reweighting.metrics("analysis/correction/") | self._expert_metrics()

    def _expert_metrics(self) -> dict[str, float]:
        """Return `train/experts/busiest`, the tokens of a layer's busiest expert divided by the mean of its experts (1:
        balanced), and `train/experts/unused`, the share of experts without a token; means over layers."""
        if self.expert_tokens is None:
            return {}
        busiest = self.expert_tokens.amax(1) / self.expert_tokens.mean(1)
        unused = (self.expert_tokens == 0).double().mean(1)
        return {"train/experts/busiest": busiest.mean().item(), "train/experts/unused": unused.mean().item()}


@dataclass
class CriticReport:
    """Sums over the optimiser steps of the critic, on one rank or over all ranks (`joined`)."""

    updates: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    """Sum of the shares of trained values whose loss was clipped."""
    grad_norm: float = 0.0
    lr: float = 0.0
    stopped: NonFiniteError | None = None
    """Error that ended the training step before its last optimiser step, the same on every rank; None without one."""

    @classmethod
    def joined(cls, reports: Iterable[CriticReport]) -> CriticReport:
        """Sum the reports over ranks; gradient norm and learning rate are equal on all ranks."""
        first, *others = reports
        whole = replace(first)
        for other in others:
            whole.loss += other.loss
            whole.clipped += other.clipped
        return whole

    def metrics(self) -> dict[str, float]:
        """Return the metrics `critic/…`, means over the optimiser steps, of which there must be at least one."""
        means = {"loss": self.loss, "clip_frac": self.clipped, "grad_norm": self.grad_norm}
        return {f"critic/{name}": total / self.updates for name, total in means.items()} | {"critic/lr": self.lr}
