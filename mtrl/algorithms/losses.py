"""Policy losses, per token, to be minimised.

Each loss takes a `TokenBatch` of N sampled tokens and returns the loss of each token, [N], with a dict of detached
tensors [N] for metrics: `ratio`, and `clipped`, 1 where a bound removed the gradient or changed the weight.
`weighted_sum` then reduces the losses to a scalar, with weights from `reductions.token_weights`.

Where the policy equals the old policy, the gradient of every loss here is -advantage with respect to the log-prob.
Below, r is exp(lp - old), A the advantage and sg the stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mtrl.algorithms.registry import policy_loss
from mtrl.config.algorithm_schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Maximum magnitude of log-ratios, which are clamped before exp: it avoids overflow, and a token with a larger
difference has no gradient."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper limit of GSPO's log-ratio, which is a mean over tokens and therefore usually far smaller (verl `gspo`)."""


@dataclass(frozen=True)
class TokenBatch:
    """The input of a policy loss: N sampled tokens of a micro-batch in flat tensors."""

    logprobs: Tensor
    """[N] log-probs under the policy, with gradient."""
    old_logprobs: Tensor
    """[N] log-probs under the old policy, as `algorithm.loss_anchor` selects it."""
    advantages: Tensor
    """[N] advantages."""
    rollout_logprobs: Tensor | None = None
    """[N] log-probs that the engine reported; None: the same as `old_logprobs`."""
    trajectory: Tensor | None = None
    """[N] int64 index of the trajectory of each token, from 0. All tokens of a trajectory are in the batch only for
    losses and corrections that are registered with `per_trajectory`. None: all tokens are of one trajectory."""

    @property
    def behaviour(self) -> Tensor:
        """[N] log-probs under the policy that sampled."""
        return self.old_logprobs if self.rollout_logprobs is None else self.rollout_logprobs

    @cached_property
    def _index(self) -> Tensor:
        return torch.zeros_like(self.logprobs, dtype=torch.long) if self.trajectory is None else self.trajectory

    def trajectory_sum(self, values: Tensor) -> Tensor:
        """[N] the sum of [N] values over the trajectory of each token."""
        count = int(self._index.max()) + 1 if len(self._index) else 0
        return values.new_zeros(count).index_add(0, self._index, values)[self._index]

    def trajectory_mean(self, values: Tensor) -> Tensor:
        """[N] the mean of [N] values over the trajectory of each token."""
        return self.trajectory_sum(values) / self.trajectory_sum(torch.ones_like(values))


Loss = tuple[Tensor, dict[str, Tensor]]
"""Losses [N] and metrics [N] by name."""


@policy_loss("ppo", aliases=("regular",))
def ppo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """max(-A r, -A clip(r, low, high)) (PPO, 1707.06347, eq. 7; asymmetric: DAPO, 2503.14476).

    The thresholds are bounds on r itself. With `dual_clip` = c > 1 the loss of a token with negative advantage is at
    most -A c (1912.09729), for any r. `clipped` is 1 where a bound removed the gradient.
    """
    ratio = _ratio(tokens.logprobs, tokens.old_logprobs)
    loss, clipped = _surrogate(ratio, tokens.advantages, config)
    return loss, _metrics(ratio, clipped)


@policy_loss("gspo", per_trajectory=True)
def gspo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """PPO's loss on s = exp(mean of lp - old over the trajectory's tokens) (GSPO, 2507.18071).

    In the token form, log s_t = sg(log s) + lp - sg(lp): the value is s, and under `loss_reduction: sequence_mean` the
    gradient is that of the sequence form, while advantages may still differ between turns. The paper bounds s to
    1 - 3e-4 and 1 + 4e-4, and has no `dual_clip`.
    """
    mean = tokens.trajectory_mean((tokens.logprobs - tokens.old_logprobs).detach())
    gradient_only = tokens.logprobs - tokens.logprobs.detach()  # exactly 0, so that the mean loses no precision
    ratio = (mean + gradient_only).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss, clipped = _surrogate(ratio, tokens.advantages, config)
    return loss, _metrics(ratio, clipped)


@policy_loss("decoupled_ppo")
def decoupled_ppo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """sg(min(exp(old - behaviour), cap)) times PPO's loss on r (Hilton et al., 2110.00641; AReaL, 2505.24298).

    The old policy is only the center of the trust region, so it may be newer than the policy that sampled; the weight
    corrects for the difference. Cap: `is_cap`. `clipped` is 1 where PPO removed the gradient or the cap changed the
    weight.
    """
    ratio = _ratio(tokens.logprobs, tokens.old_logprobs)
    loss, clipped = _surrogate(ratio, tokens.advantages, config)
    behaviour = _ratio(tokens.old_logprobs, tokens.behaviour)
    # Equal log-probs get the weight 1, also if both are infinite, where the difference would be NaN.
    behaviour = behaviour.masked_fill(tokens.old_logprobs == tokens.behaviour, 1.0).detach()
    return behaviour.clamp(max=config.is_cap) * loss, _metrics(ratio, clipped | (behaviour > config.is_cap))


@policy_loss("cispo")
def cispo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """-sg(clip(r, low, high)) A lp (MiniMax-M1, 2506.13585): the weight is clipped, and every token keeps a gradient.

    The paper has no lower bound, as with `clip_low_threshold: 0`. `clipped` is 1 where a bound changed the weight.
    """
    ratio = _ratio(tokens.logprobs, tokens.old_logprobs).detach()
    weight = ratio.clamp(config.clip_low_threshold, config.clip_high_threshold)
    return -weight * tokens.advantages * tokens.logprobs, _metrics(ratio, weight != ratio)


@policy_loss("importance_sampling", aliases=("reinforce_is",))
def importance_sampling(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """-sg(min(r, cap)) A lp: REINFORCE with truncated importance weights; `is_cap: .inf` turns truncation off.

    `clipped` is 1 where the cap changed the weight.
    """
    ratio = _ratio(tokens.logprobs, tokens.old_logprobs).detach()
    weight = ratio.clamp(max=config.is_cap)
    return -weight * tokens.advantages * tokens.logprobs, _metrics(ratio, weight != ratio)


@policy_loss("sapo")
def sapo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """-A (4 / τ) σ(τ (r - 1)), τ = `tau_positive` if A > 0, else `tau_negative` (SAPO, 2511.20347).

    The gate is soft: its slope in r is 1 at r = 1 and decays to either side, faster for a higher τ. `clipped` is 0.
    """
    ratio = _ratio(tokens.logprobs, tokens.old_logprobs)
    positive = tokens.advantages > 0
    tau = torch.where(positive, config.sapo.tau_positive, config.sapo.tau_negative).to(ratio.dtype)
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return -tokens.advantages * gate, _metrics(ratio, torch.zeros_like(positive))


@policy_loss("dppo")
def dppo(tokens: TokenBatch, config: AlgorithmConfig) -> Loss:
    """-sg(min(r, cap)) A lp where the token's probability stays close, else 0 (DPPO, 2602.04879, binary form).

    A token is masked if its probability has already moved in the direction of its advantage and `dppo.divergence`
    exceeds `delta_high` (A > 0, probability up) or `delta_low` (A < 0, probability down). The cap is `is_cap`; the
    authors use none. `clipped` is 1 where a token was masked or the cap changed its weight.
    """
    settings, advantages = config.dppo, tokens.advantages
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    ratio = _ratio(logprobs, old)
    divergence = DIVERGENCES[settings.divergence](old.exp(), logprobs.exp())
    too_high = (advantages > 0) & (logprobs > old) & (divergence > settings.delta_high)
    too_low = (advantages < 0) & (logprobs < old) & (divergence > settings.delta_low)
    masked = too_high | too_low
    weight = ratio.clamp(max=config.is_cap).masked_fill(masked, 0.0)
    return -weight * advantages * tokens.logprobs, _metrics(ratio, weight != ratio)


def binary_tv(old: Tensor, new: Tensor) -> Tensor:
    """Total variation between two binary distributions "this token or another", from the token's probabilities."""
    return (new - old).abs()


def binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """KL(old || new) between two binary distributions "this token or another", from the token's probabilities."""
    rounding = torch.finfo(old.dtype).eps  # 1 - p below this is only rounding error, and must not make the KL infinite
    old_other, new_other = (1.0 - old).clamp(min=rounding), (1.0 - new).clamp(min=rounding)
    this = torch.xlogy(old, old) - torch.xlogy(old, new)
    return this + torch.xlogy(old_other, old_other) - torch.xlogy(old_other, new_other)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tv": binary_tv, "kl": binary_kl}
"""Divergence functions, by the value of `algorithm.dppo.divergence`."""


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return Σ weight x loss over all tokens, a scalar. A loss of weight 0 counts as 0 even if it is not finite
    (padding)."""
    return torch.where(weights != 0, losses * weights, 0.0).sum()


def clamped_log_ratio(logprobs: Tensor, other: Tensor) -> Tensor:
    """Return logprobs - other, clamped to ±20; the gradient is 0 beyond."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return clamped_log_ratio(logprobs, old_logprobs).exp()


def _surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss [N], with dual clip if that is set, and a mask [N] of the tokens where a bound removed
    the gradient."""
    low, high, dual = config.clip_low_threshold, config.clip_high_threshold, config.dual_clip
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    if dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
        clipped = clipped | ((advantages < 0) & (ratio > dual))
    return loss, clipped


def _metrics(ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio.detach(), "clipped": clipped.to(ratio.dtype)}
