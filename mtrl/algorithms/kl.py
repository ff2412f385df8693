"""Estimators of KL(policy || reference), per token, from the log-probs of sampled tokens; and the weight of the KL.

All estimators take log-probs under the policy (with gradient), the reference and the old policy that sampled: tensors
of the same shape. With d = lp - ref, and one token sampled from the policy in a given state (values:
joschu.net/blog/kl-approx.html; gradients: enumerated in the tests):

=============  =========================  ===================  ==============================
name           formula                    expected value       expected gradient as a loss
=============  =========================  ===================  ==============================
k1             d                          KL(policy || ref)    0: useless as a loss
k2             d^2 / 2                    neither              of KL(policy || ref)
k3             e^-d - 1 + d               KL(policy || ref)    of KL(ref || policy)
k3_plus        k3, with k2's gradient     KL(policy || ref)    of KL(policy || ref)
k1_unbiased    r k1, r = exp(lp - old)    KL(policy || ref)    of KL(policy || ref)
k3_unbiased    r k3                       KL(policy || ref)    of KL(policy || ref), low variance
=============  =========================  ===================  ==============================

The two estimators with a ratio stay unbiased for a token that an older policy sampled; the others are then biased.

Over several tokens no loss has the gradient of the KL between whole episodes: each omits the effect of a token on the
states of later tokens, and so on their KL, and off policy the states are those of the older policy. On policy, k1 in
the reward omits nothing, since a token there gets credit for the rewards after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mtrl.algorithms.losses import clamped_log_ratio
from mtrl.algorithms.registry import kl_estimator


@kl_estimator("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """lp - ref: suitable as a metric or a reward penalty; as a loss its expected gradient is 0."""
    return clamped_log_ratio(logprobs, ref_logprobs)


@kl_estimator("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """(lp - ref)^2 / 2: unbiased gradient for its token, biased value."""
    return clamped_log_ratio(logprobs, ref_logprobs).square() / 2


@kl_estimator("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """e^-d - 1 + d: unbiased value, never negative (GRPO's penalty, 2402.03300, eq. 4)."""
    d = clamped_log_ratio(logprobs, ref_logprobs)
    return (-d).expm1() + d


@kl_estimator("k3_plus")
def k3_plus(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k3's value with k2's gradient (straight-through, as verl's `k3+`)."""
    slope = k2(logprobs, ref_logprobs, old_logprobs)
    return slope + (k3(logprobs, ref_logprobs, old_logprobs) - slope).detach()


@kl_estimator("k1_unbiased")
def k1_unbiased(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r k1: unbiased value and gradient for its token, also off policy."""
    return clamped_log_ratio(logprobs, old_logprobs).exp() * k1(logprobs, ref_logprobs, old_logprobs)


@kl_estimator("k3_unbiased")
def k3_unbiased(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """r k3: unbiased value and gradient for its token, also off policy, with the variance of k3 (DeepSeek-V3.2,
    2512.02556)."""
    return clamped_log_ratio(logprobs, old_logprobs).exp() * k3(logprobs, ref_logprobs, old_logprobs)


MAX_KL_ERROR = 0.2
"""Maximum relative error of the KL in an update of the controller; larger errors are clipped to it."""


@dataclass
class KlController:
    """The weight of the KL, fixed or adapted to a target (Ziegler et al., 1909.08593, section 2.2).

    `coefficient` is the whole state: a checkpoint stores it and a resumed run sets it.
    """

    coefficient: float
    target: float | None = None
    """Target of the KL, in nats per token; None: the coefficient is fixed."""
    horizon: int = 10_000
    """Number of trajectories over which an error of a fifth of the target or more changes the coefficient by about a
    fifth."""

    def update(self, kl: float, trajectories: int) -> None:
        """Set coefficient *= 1 + clip(kl / target - 1, ±0.2) x trajectories / horizon, after a step of that size.

        A step longer than the horizon counts as one horizon, so that the coefficient stays positive.
        """
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        self.coefficient *= 1.0 + error * min(trajectories / self.horizon, 1.0)
