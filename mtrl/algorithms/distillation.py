"""On-policy distillation: the reverse KL to a teacher at each sampled token.

The student's loss in a state is the reverse KL, KL(student || teacher) = E_student[log student - log teacher]. Its
gradient is E_student[(log student - log teacher) ∇ log student]: that of REINFORCE with the advantage
log teacher - log student, since the gradient of the expected log-prob itself is 0. The effect of a token on the states
of later tokens is left out, a discount of 0, as in Thinking Machines, "On-Policy Distillation"
(thinkingmachines.ai/blog/on-policy-distillation); MiniLLM (2306.08543) has the whole return.

With the teacher's k most probable tokens S, and p and q the distributions of student and teacher, the gradient is

    Σ_{i in S} log(p_i / q_i) ∇p_i  +  E_{y ~ p}[1(y not in S) log(p_y / q_y) ∇log p_y],

a sum over S that needs no sampling (`top_k_loss`), and an advantage for the sampled tokens outside of S (`outside`).
Summing a part of an expectation and sampling the rest is Rao-Blackwellisation (Liu et al., 1810.04777): the mean stays
that of the whole KL for every k, and the variance is that of the sampled part alone. So the tail is neither cut nor
renormalised, as in top-k losses that minimise another divergence (GKD, 2306.13649, has the KL of whole distributions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrl.algorithms.batch import Floats
from mtrl.algorithms.losses import MAX_LOG_RATIO, clamped_log_ratio
from mtrl.types import TopTokens


@dataclass(frozen=True)
class TeacherScores:
    """The scores of a teacher at the A sampled tokens of a sample."""

    logprobs: Floats
    """[A] the log-prob of each sampled token under the teacher."""
    top: TopTokens
    """The k most probable tokens of the teacher at each sampled token."""


def reverse_kl(student: Floats, teacher: Floats) -> Floats:
    """Return the estimate k1 = log student - log teacher of the reverse KL of each sampled token, [N], in nats, within
    ±`MAX_LOG_RATIO`: a token that the teacher excludes would otherwise outweigh all others of a step.

    Args:
        student: [N] log-probs under the policy that sampled.
        teacher: [N] log-probs of the same tokens under the teacher.
    """
    return np.clip(student - teacher, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def mixed(rewarded: Floats, kl: Floats, reward_weight: float, weight: float) -> Floats:
    """Return the advantages reward_weight x rewarded - weight x kl, [N].

    Args:
        rewarded: [N] advantages from rewards.
        kl: [N] result of `reverse_kl`.
    """
    return reward_weight * rewarded - weight * kl


def outside(sampled: NDArray[np.int64], top: TopTokens) -> NDArray[np.bool_]:
    """Return whether each sampled token is none of the k tokens whose KL `top_k_loss` sums, [A].

    Args:
        sampled: [A] ids.
    """
    return ~(top.ids == sampled[:, None]).any(axis=1)


def top_k_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return Σ_i p_i sg(log p_i - log q_i) over k tokens, [N], in nats, where sg is the stop-gradient: the part of the
    reverse KL of these tokens, whose gradient is the first sum of the formula above. The log-ratios are limited as in
    `reverse_kl`.

    Args:
        student: [N, k] log-probs log p under the policy, with gradient.
        teacher: [N, k] log-probs log q of the same tokens under the teacher.
    """
    teacher = teacher.clamp(min=torch.finfo(teacher.dtype).min)  # two infinities would have the ratio NaN
    return (student.exp() * clamped_log_ratio(student, teacher).detach()).sum(-1)
