"""Off-policy corrections: weights on the loss for differences between the log-probs of engine and trainer.

Each correction maps d = trainer - rollout log-probs [N] to weights [N] without gradient. The trainer's log-probs are
those of the old policy with `algorithm.loss_anchor=old`, and those of the current policy with
`algorithm.loss_anchor=rollout`. Denominators are counted before any token is masked, so masking does not increase the
weight of the remaining tokens.

Bounds are on e^d, or on its product or geometric mean over a trajectory; `correction_low` and `correction_high` replace
the published bounds. Log-ratios are clamped to ±20, per token and per trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrl.algorithms.losses import MAX_LOG_RATIO, TokenBatch
from mtrl.algorithms.registry import off_policy_correction
from mtrl.config.algorithm_schema import PUBLISHED_BOUNDS, AlgorithmConfig


@off_policy_correction("none")
def none(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """1 for all tokens: no correction."""
    return torch.ones_like(difference)


@off_policy_correction("tis")
def tis(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """min(e^d, 2) per token: truncated importance sampling (Yao et al., fengyao.notion.site/off-policy-rl)."""
    return _ratio(difference).clamp(*_bounds(config, "tis"))


@off_policy_correction("sequence_tis", per_trajectory=True)
def sequence_tis(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """min(e^(Σ d), 2), the sum over a trajectory: the ratio of whole trajectories (richardli.xyz/rl-collapse).

    It is less biased than `tis`, and its variance grows with the length.
    """
    return _ratio(tokens.trajectory_sum(_clamp(difference))).clamp(*_bounds(config, "sequence_tis"))


@off_policy_correction("icepop")
def icepop(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """e^d where 0.5 <= e^d <= 5, else 0: tokens with a larger difference are masked (IcePop, 2510.18855)."""
    ratio = _ratio(difference)
    return torch.where(_within(ratio, _bounds(config, "icepop")), ratio, 0.0)


@off_policy_correction("mis", per_trajectory=True)
def mis(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """1 where 0.5 <= e^(Σ d) <= 2, the sum over a trajectory, else 0 (richardli.xyz/rl-collapse; verl `seq_sum_k1`).

    It only masks. A trajectory within the bounds has the weight 1, as in verl, not its ratio as in the article.
    """
    ratio = _ratio(tokens.trajectory_sum(_clamp(difference)))
    return _within(ratio, _bounds(config, "mis")).to(difference.dtype)


@off_policy_correction("geometric", per_trajectory=True)
def geometric(difference: Tensor, tokens: TokenBatch, config: AlgorithmConfig) -> Tensor:
    """1 where 0.999 <= e^(mean d) <= 1.001, the mean over a trajectory, else 0 (verl `seq_mean_k1`).

    It is like `mis`, but a mean does not grow with the length of the trajectory, as a sum does.
    """
    ratio = _ratio(tokens.trajectory_mean(_clamp(difference)))
    return _within(ratio, _bounds(config, "geometric")).to(difference.dtype)


@dataclass(frozen=True)
class Reweighting:
    """Sums over tokens of the weights of a correction. `+` combines micro-batches and ranks."""

    tokens: int = 0
    nonzero: int = 0
    weight: float = 0.0
    weight_max: float = 0.0

    @classmethod
    def of(cls, weights: Tensor) -> Reweighting:
        """Sum up the weights [N]."""
        if not weights.numel():
            return cls()
        nonzero = int((weights != 0).sum())
        return cls(weights.numel(), nonzero, weights.double().sum().item(), weights.max().item())

    def __add__(self, other: Reweighting) -> Reweighting:
        return Reweighting(
            self.tokens + other.tokens,
            self.nonzero + other.nonzero,
            self.weight + other.weight,
            max(self.weight_max, other.weight_max),
        )

    def metrics(self, prefix: str = "correction/") -> dict[str, float]:
        """Return the share of tokens whose weight is not 0, the mean weight and the largest weight; empty without
        tokens."""
        if not self.tokens:
            return {}
        values = {
            "kept_frac": self.nonzero / self.tokens,
            "weight_mean": self.weight / self.tokens,
            "weight_max": self.weight_max,
        }
        return {prefix + name: value for name, value in values.items()}


def _clamp(difference: Tensor) -> Tensor:
    return difference.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(difference: Tensor) -> Tensor:
    return _clamp(difference).exp()


def _bounds(config: AlgorithmConfig, name: str) -> tuple[float, float]:
    """Return the configured bounds of the correction `name`, or the published bounds where none are configured."""
    low, high = PUBLISHED_BOUNDS[name]
    own_low, own_high = config.correction_low, config.correction_high
    return low if own_low is None else own_low, high if own_high is None else own_high


def _within(ratio: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (bounds[0] <= ratio) & (ratio <= bounds[1])
