"""Mismatch: the distance between the trainer's and the engine's log-probs of the sampled tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.losses import MAX_LOG_RATIO, clamped_log_ratio


@dataclass(frozen=True)
class DriftSums:
    """Sums over tokens, and over trajectories, of functions of d = trainer - rollout (nats).

    `+` combines micro-batches and ranks; a trajectory that is split over two of them counts as two trajectories.
    """

    tokens: int = 0
    difference: float = 0.0
    absolute: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    absolute_max: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = 0.0
    trajectories: int = 0
    trajectory_ratio_squared: float = 0.0
    """Sum over trajectories of the squared ratio (e^(Σ d))^2."""
    perplexity_ratio: float = 0.0
    """Sum over trajectories of e^(-mean d), the trainer's perplexity divided by the engine's."""

    def __add__(self, other: DriftSums) -> DriftSums:
        return DriftSums(
            self.tokens + other.tokens,
            self.difference + other.difference,
            self.absolute + other.absolute,
            self.k3 + other.k3,
            self.ratio + other.ratio,
            self.ratio_squared + other.ratio_squared,
            max(self.absolute_max, other.absolute_max),
            min(self.ratio_min, other.ratio_min),
            max(self.ratio_max, other.ratio_max),
            self.trajectories + other.trajectories,
            self.trajectory_ratio_squared + other.trajectory_ratio_squared,
            self.perplexity_ratio + other.perplexity_ratio,
        )

    def metrics(self, prefix: str = "mismatch/") -> dict[str, float]:
        """Return the metrics that verl calls `rollout_corr/…`; empty without tokens.

        Means over tokens: |d| (and its maximum), k1 and k3 as estimates of KL(rollout || trainer), the ratio e^d, and
        the chi-square divergence of trainer from rollout (mean of the squared ratio, minus 1). Means over trajectories,
        if `measure` was given their indices: `chi2_seq`, the same divergence with the ratio of whole trajectories, and
        `ppl_ratio`, the trainer's perplexity divided by the engine's; it is above 1 if the sampled tokens are less
        likely under the trainer.
        """
        if not self.tokens:
            return {}
        ratio, squared = self.ratio / self.tokens, self.ratio_squared / self.tokens
        values = {
            "abs_mean": self.absolute / self.tokens,
            "abs_max": self.absolute_max,
            "k1": -self.difference / self.tokens,
            "k3": self.k3 / self.tokens,
            "ratio_mean": ratio,
            "ratio_std": math.sqrt(max(squared - ratio * ratio, 0.0)),
            "ratio_min": self.ratio_min,
            "ratio_max": self.ratio_max,
            "chi2": squared - 1.0,
        }
        if self.trajectories:
            values["chi2_seq"] = self.trajectory_ratio_squared / self.trajectories - 1.0
            values["ppl_ratio"] = self.perplexity_ratio / self.trajectories
        return {prefix + name: value for name, value in values.items()}


def measure(
    trainer: Tensor, rollout: Tensor, mask: Tensor | None = None, trajectory: Tensor | None = None
) -> DriftSums:
    """Return the drift over the tokens where `mask` is true (None: over all tokens); in ratios d is clamped to ±20.

    Args:
        trainer, rollout: log-probs; they have the same shape, as have `mask` and `trajectory`.
        trajectory: int64 index of the trajectory of each token; None: no statistics per trajectory.
    """
    if mask is not None:
        chosen = mask.bool()
        trainer, rollout = trainer[chosen], rollout[chosen]
        trajectory = None if trajectory is None else trajectory[chosen]
    if not trainer.numel():
        return DriftSums()
    trainer, rollout = trainer.detach().double(), rollout.detach().double()
    difference, d = trainer - rollout, clamped_log_ratio(trainer, rollout)
    ratio = d.exp()
    sums, counts = _per_trajectory(d, trajectory)
    return DriftSums(
        tokens=trainer.numel(),
        difference=difference.sum().item(),
        absolute=difference.abs().sum().item(),
        k3=(d.expm1() - d).sum().item(),
        ratio=ratio.sum().item(),
        ratio_squared=ratio.square().sum().item(),
        absolute_max=difference.abs().max().item(),
        ratio_min=ratio.min().item(),
        ratio_max=ratio.max().item(),
        trajectories=len(counts),
        trajectory_ratio_squared=(2.0 * sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp().sum().item(),
        perplexity_ratio=(-sums / counts).exp().sum().item(),
    )


def _per_trajectory(values: Tensor, trajectory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of the values and the number of tokens, for each trajectory that has tokens."""
    if trajectory is None:
        return values.new_zeros(0), values.new_zeros(0)
    _, index, counts = trajectory.flatten().unique(return_inverse=True, return_counts=True)
    return values.new_zeros(len(counts)).index_add(0, index, values.flatten()), counts
