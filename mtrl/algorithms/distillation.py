"""On-policy distillation: the advantage of a sampled token from a teacher's log-prob of it.

The student's loss in a state is the reverse KL, KL(student || teacher) = E_student[log student - log teacher]. Its
gradient is E_student[(log student - log teacher) ∇ log student]: that of REINFORCE with the advantage
log teacher - log student, since the gradient of the expected log-prob itself is 0. The effect of a token on the states
of later tokens is left out, a discount of 0, as in Thinking Machines, "On-Policy Distillation"
(thinkingmachines.ai/blog/on-policy-distillation); MiniLLM (2306.08543) has the whole return.
"""

from __future__ import annotations

import numpy as np

from mtrl.algorithms.batch import Floats
from mtrl.algorithms.losses import MAX_LOG_RATIO


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
